"""DataLoader's iterators."""

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

LoaderIterator = _BaseDataLoaderIter
"""The class of what ``iter(DataLoader(...))`` returns, by which another loader's iterator is told apart."""

remove_worker_pids = torch._C._remove_worker_pids
"""Have torch's signal handler no longer watch an iterator's worker processes, by the iterator's ``id``.

The handler raises in the main thread, wherever that is; DataLoader has no option to leave it out.
"""
