"""Memory snapshots of torch, made by hand in the format of `torch.cuda.memory._snapshot`."""

import pickle
import random

import pytest

import perfmodel
from perfmodel.fitting import memory_snapshot
from perfmodel.fitting.memory_snapshot import is_snapshot, read_snapshot
from perfmodel.foundation.errors import InputError

MIB = 2**20


def frames(file, line, name):
    """A stack as torch records it: C++ frames, torch's own Python, then the user's."""
    return [
        {"filename": "??", "line": 0, "name": "at::native::empty_cuda"},
        {"filename": "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", "line": 125, "name": "forward"},
        {"filename": file, "line": line, "name": name},
    ]


WEIGHTS, FORWARD, STEP = frames("/job/model.py", 10, "__init__"), frames("/job/model.py", 42, "forward"), frames("/job/train.py", 7, "main")
BACKWARD = [{"filename": "??", "line": 0, "name": "torch::autograd::Engine::thread_main"}]


def event(action, address, size, stack=()):
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": list(stack)}


def block(address, size, stack, state="active_allocated"):
    return {"address": address, "size": -(-size // 512) * 512, "requested_size": size, "state": state, "frames": list(stack)}


def snapshot(path, blocks, events, *, reserved=400 * MIB, **more):
    """A snapshot of one device, with one segment."""
    segment = {
        "device": 0,
        "address": 0,
        "total_size": reserved,
        "allocated_size": sum(allocation["size"] for allocation in blocks),
        "active_size": sum(allocation["size"] for allocation in blocks),
        "requested_size": sum(allocation["requested_size"] for allocation in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [*blocks, block(1 << 40, 512, [], "inactive")],
    }
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0, "expandable_segments": False}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events], "allocator_settings": settings, **more}))
    return path


def step_snapshot(path):
    """Weights that live before the history, activations that grow and go, an optimizer state that stays."""
    events = [
        event("segment_alloc", 0, 100 * MIB),
        event("alloc", 2, 60 * MIB, FORWARD),
        event("alloc", 3, 40 * MIB, FORWARD),
        event("alloc", 4, 30 * MIB, BACKWARD),
        event("free_requested", 2, 60 * MIB, STEP),
        event("free_completed", 2, 60 * MIB, STEP),
        event("free_completed", 3, 40 * MIB, STEP),
        event("segment_free", 9, 50 * MIB),
        event("alloc", 2, 20 * MIB, STEP),
        event("free_completed", 4, 30 * MIB, STEP),
    ]
    return snapshot(path, [block(1, 100 * MIB, WEIGHTS), block(2, 20 * MIB, STEP)], events)


def test_the_peak_is_found_by_replaying_the_history(tmp_path):
    (peak,) = read_snapshot(step_snapshot(tmp_path / "s.pickle"))
    assert (peak.num_events, peak.device, peak.refused) == (10, 0, 0)
    assert peak.allocated == 230 * MIB
    assert (peak.reserved, peak.most_reserved, peak.fragmentation) == (450 * MIB, 450 * MIB, 220 * MIB)
    assert [(site.where, site.num_blocks, site.num_bytes // MIB) for site in peak.sites] == [
        ("job/model.py:10 __init__", 1, 100),
        ("job/model.py:42 forward", 2, 100),
        ("no Python frame (such as the backward pass)", 1, 30),
    ]


def test_random_histories_have_the_peak_of_a_forward_replay(tmp_path):
    draw = random.Random(3)
    for _ in range(20):
        live, events, most, at_peak = {}, [], 0, {}
        for address in range(1, 200):
            if live and draw.random() < 0.5:
                gone = draw.choice(list(live))
                events.append(event("free_completed", gone, live.pop(gone)[0]))
            else:
                line = draw.randrange(5)
                live[address] = (draw.randrange(1, 1000), frames("/job/a.py", line, "f"))
                events.append(event("alloc", address, *live[address]))
            if sum(size for size, _ in live.values()) > most:
                most, at_peak = sum(size for size, _ in live.values()), dict(live)
        cut = draw.randrange(100)  # a history is a ring: its start is lost
        blocks = [block(address, *allocation) for address, allocation in live.items()] or [block(999, 1, [])]
        snapshot(tmp_path / "s.pickle", blocks, events)
        (peak,) = read_snapshot(tmp_path / "s.pickle")
        if live:
            assert peak.allocated == most
            assert sum(site.num_bytes for site in peak.sites) == most
            assert sum(site.num_blocks for site in peak.sites) == len(at_peak)
        snapshot(tmp_path / "s.pickle", blocks, events[cut:])
        (late,) = read_snapshot(tmp_path / "s.pickle")
        assert sum(site.num_bytes for site in late.sites) == late.allocated <= peak.allocated


def test_without_a_history_the_state_counts(tmp_path):
    (peak,) = read_snapshot(snapshot(tmp_path / "s.pickle", [block(1, MIB, WEIGHTS)], []))
    assert (peak.num_events, peak.allocated, peak.reserved) == (0, MIB, 400 * MIB)


def test_a_failed_allocation_is_read(tmp_path):
    failed = {"action": "oom", "size": 5 * MIB, "device_free": MIB, "stream": 0, "frames": []}
    (peak,) = read_snapshot(snapshot(tmp_path / "s.pickle", [block(1, MIB, WEIGHTS)], [failed]))
    assert peak.refused == 5 * MIB


def test_the_predicted_memory_is_compared_with_what_is_in_tensors(tmp_path):
    plan = perfmodel.predict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=8, seq_len=1024)
    comparison = perfmodel.compare_memory(step_snapshot(tmp_path / "s.pickle"), plan.plan)
    assert comparison.predicted == plan.memory
    assert comparison.predicted_allocated == pytest.approx(plan.memory["total"] - plan.memory["allocator"] - plan.memory["framework"])


class Harmful:
    def __reduce__(self):
        return (open, ("harmed", "w"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (pickle.dumps(Harmful()), "it names .*open, which is not loaded"),
        (pickle.dumps({"segments": [Harmful()]}, protocol=2), "it names .*open, which is not loaded"),
        (b"\x80\x04", "cannot be read as a memory snapshot"),
        (b"text", "cannot be read as a memory snapshot"),
        (pickle.dumps([1]), r"is no memory snapshot \(segments is missing or damaged\)"),
        (pickle.dumps({"segments": [1]}), r"\(segments is missing or damaged\)"),
        (pickle.dumps({"segments": [], "device_traces": 1}), r"\(device_traces is missing or damaged\)"),
        (pickle.dumps({"segments": [], "device_traces": [[1]]}), r"\(device_traces is missing or damaged\)"),
        (pickle.dumps({"segments": []}), "a snapshot without allocated memory"),
        (pickle.dumps({"segments": [{"total_size": -1, "blocks": []}]}), r"\(total_size is missing or damaged\)"),
        (pickle.dumps({"segments": [{"total_size": 1, "blocks": [{"state": "active", "size": True}]}]}), r"\(requested_size is"),
        (
            pickle.dumps({"segments": [{"total_size": 1, "blocks": [{"state": "active", "size": 1, "address": "x"}]}]}),
            r"\(address is",
        ),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "free_completed", "addr": [], "size": 1}]]}), r"\(addr is missing"),
    ],
)
def test_other_pickles_are_refused_and_nothing_is_executed(tmp_path, monkeypatch, content, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.pickle").write_bytes(content)
    assert is_snapshot(tmp_path / "s.pickle")
    with pytest.raises(InputError, match=sentence) as caught:
        read_snapshot(tmp_path / "s.pickle")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()


def test_large_files_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_snapshot, "MOST_FILE_BYTES", 10)
    with pytest.raises(InputError, match=r"at most .* are read; record fewer events"):
        read_snapshot(step_snapshot(tmp_path / "s.pickle"))
