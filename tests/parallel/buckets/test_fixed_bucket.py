import torch

from everygpu.parallel.buckets.fixed_bucket import FixedBucket

HERE = torch.device("cpu")


def make_tensors():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return [torch.randn(5), image, torch.randn(3, 7).T, torch.randn(()), torch.randn(0, 2)]


def make_bucket(tensors, keep_storage=False):
    return FixedBucket(tensors, HERE, [HERE, HERE], keep_storage=keep_storage)


def equals(bucket, tensors):
    return all(torch.equal(slot, t) for row in bucket.slots for slot, t in zip(row, tensors))


def test_copies_are_the_originals():
    tensors = [*make_tensors(), torch.randn(6, 6)[:, ::2]]
    bucket = make_bucket(tensors)
    bucket.send()
    assert equals(bucket, tensors)


def test_copies_follow_writes_and_moves():
    tensors = make_tensors()
    bucket = make_bucket(tensors)
    bucket.send()
    addresses = [t.data_ptr() for row in bucket.slots for t in row]
    tensors[0].data.fill_(3)  # which torch doesn't count
    tensors[1].data = torch.full_like(tensors[1], 4)
    bucket.send()
    assert equals(bucket, tensors)
    assert [t.data_ptr() for row in bucket.slots for t in row] == addresses


def test_tensors_of_one_storage_stay_in_it():
    storage = torch.randn(20)
    tensors = [storage[12:20], storage[0:10].view(2, 5)]
    bucket = make_bucket(tensors, keep_storage=True)
    bucket.send()
    assert equals(bucket, tensors)
    assert [slot.storage_offset() for slot in bucket.slots[0]] == [12, 0]


def test_graphs_notice_what_was_written_alone():
    tensors = [torch.randn(3), torch.randn(3)]
    bucket = make_bucket(tensors)
    bucket.send()
    before = [t._version for t in bucket.slots[1]]
    tensors[1].mul_(2)
    bucket.send()
    bucket.send()
    assert [t._version - v for t, v in zip(bucket.slots[1], before)] == [0, 1]


def test_gradients_travel_without_gaps():
    tensors = [torch.randn(3), torch.randn(2, 5)]
    plan = make_bucket(tensors).grad_plan
    flat = plan.flatten({0: torch.ones(3), 1: torch.full((5, 2), 2.0).T}, HERE)
    assert flat.tolist() == [1] * 3 + [2] * 10
    wide = torch.ones(2, 5, dtype=torch.float64)
    assert plan.flatten({1: wide}, HERE).tolist() == [0] * 3 + [1] * 10
    assert plan.flatten({0: torch.zeros(3), 1: wide}, HERE).dtype is torch.float32
