import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Hundreds of products of a few thousand entries: waking a second thread costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
