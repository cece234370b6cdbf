"""Maps names to owners and shards: state dicts, checkpoint folders, pretrained weights.

Its entries leave ``torch.inference_mode``, in which DTensors cannot be detached and what is made can never be trained.
"""
