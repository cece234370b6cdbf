"""Maps names to owners and shards: state dicts, checkpoint folders, pretrained weights."""
