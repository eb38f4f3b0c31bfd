"""State in host memory: the same numbers, the same checkpoints, and nothing left on the device
after a pass."""

import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils

from paceline.memory_plan import with_rows
from paceline.model_shape import blocks_of
from paceline.process import parked_memory
from paceline.process.parked_memory import ParkedMemory, StillInUse
from policy_worker import trainer as trainers
from policy_worker.checkpoint.checkpoint import Checkpointer
from policy_worker.model import host_activations, host_memory, host_weights
from policy_worker.model.heads import score
from policy_worker.model.host_activations import HostActivations
from policy_worker.model.host_weights import keep_on_host
from policy_worker.objectives.objective import Part
from policy_worker.ranks.sharding import load_sharded
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.rows.replica import Replica
from policy_worker.step import optimizer as moments
from policy_worker.step import optimizer as update
from policy_worker.step.optimizer import build_optimizer
from policy_worker.trainer import Trainer
from tests.fixtures.policy_models import random_groups, tiny_network
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda")


def trained(config, steps=3):
    torch.manual_seed(1)
    state = tiny_state(config)
    for _ in range(steps):
        synthetic_step(state)
    return state


@pytest.mark.parametrize("bucket", [64, moments.BUCKET])
def test_moments_on_the_host_give_the_same_bits(tmp_path, monkeypatch, bucket):
    """64 elements: parameters of several pieces, and pieces of several parameters in a bucket."""
    kind = moments.HostMomentsAdamW
    monkeypatch.setattr(update, "HostMomentsAdamW", partial(kind, bucket=bucket))
    here = trained(tiny_config(tmp_path))
    there = trained(tiny_config(tmp_path, offload_optimizer=True))
    assert isinstance(there.optimizer, kind)
    assert_same_bits(all_bits(there), all_bits(here))


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_goes_on_with_the_moments_elsewhere(tmp_path, first):
    """The setting may change when a run is continued."""
    configs = [tiny_config(tmp_path, offload_optimizer=given) for given in (first, not first)]
    begun = trained(configs[0])
    saver = Checkpointer(tmp_path, configs[0])
    path = saver.save_async(begun).result().path
    saver.close()
    states = [tiny_state(config) for config in configs]
    for state, config in zip(states, configs, strict=True):
        reader = Checkpointer(tmp_path, config)
        reader.restore(state, path)
        reader.close()
        torch.manual_seed(2)
        synthetic_step(state)
    assert states[0].step == 4
    assert_same_bits(all_bits(states[1]), all_bits(states[0]))


def test_moments_are_on_the_host_and_weights_are_not(tmp_path):
    model = tiny_network("qwen3").to(META)
    config = tiny_config(tmp_path, offload_optimizer=True)
    for state in build_optimizer({"policy": model}, config.train).state.values():
        assert {name: t.device.type for name, t in state.items()} == {
            "step": "meta",
            "exp_avg": "cpu",
            "exp_avg_sq": "cpu",
        }


def test_a_resting_parameter_takes_no_step_on_the_host_either():
    rests, moves = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = moments.HostMomentsAdamW([rests, moves], lr=0.1, weight_decay=0.1, fused=True)
    for parameter in (rests, moves):
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": moments.zeros_on_host(parameter),
            "exp_avg_sq": moments.zeros_on_host(parameter),
        }
    moves.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(rests.detach(), torch.ones(3))
    assert [float(optimizer.state[p]["step"]) for p in (rests, moves)] == [0.0, 1.0]
    assert bool((moves.detach() < 1).all())


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_frozen_blocks_are_on_the_device_one_at_a_time(family, monkeypatch):
    """A device without data stands for one with: what computes there, and what comes back, can be
    asked."""
    # It asks for the value of a tensor, which there has none.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    model = tiny_network(family).requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    blocks = blocks_of(model)
    keep_on_host(model, blocks, META)
    seen = []

    def look(*_):
        seen.append([{p.device.type for p in block.parameters()} for block in blocks])

    for block in blocks:
        block.register_forward_pre_hook(look)
    micro = pack(decode(random_groups(2, group_size=2, seed=3)), torch.arange(4).numpy(), META)
    with torch.no_grad():
        assert score(model, micro, 1.0).logprobs.device.type == "meta"
    assert seen == [[{"meta"}, {"cpu"}], [{"cpu"}, {"meta"}]]
    assert_same_bits(dict(model.named_parameters()), before)


def test_weights_come_back_from_a_forward_that_failed():
    model = tiny_network("qwen3").requires_grad_(False)
    keep_on_host(model, blocks_of(model), META)
    micro = pack(decode(random_groups(1, group_size=2, seed=3)), torch.arange(2).numpy(), CPU)
    with torch.no_grad(), pytest.raises(RuntimeError):
        score(model, micro, 1.0)  # tokens and weights are on two devices
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_offloaded_reference_gives_the_same_log_probs(tmp_path):
    micro = pack(
        decode(random_groups(2, group_size=2, seed=3, vocab=15)), torch.arange(4).numpy(), CPU
    )
    found = []
    for given in (False, True):
        config = tiny_config(tmp_path, offload_frozen=given)
        model = load_sharded(Part("reference"), config, Replica(), CPU, trainable=False)
        with torch.no_grad():
            found.append(score(model, micro, 1.0).logprobs)
    assert torch.equal(*found)


def test_settled_rows_are_those_of_the_state_and_not_of_the_run(tmp_path, monkeypatch):
    config = tiny_config(tmp_path)
    monkeypatch.setattr(trainers, "settle_rows", lambda config, *_: with_rows(config, 64, True))
    trainer = Trainer(config, CPU)
    assert trainer.state.config.train.memory.row_tokens == 64 and trainer.config is config
    assert trainer.state.model.is_gradient_checkpointing


def on_device(trainer: Trainer) -> int:
    """Bytes of the state and of the frozen models there."""
    tensors = [tensor for kind in trainer._on_device() for tensor in kind]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize(("dtype", "algorithm"), [("float32", "ppo"), ("bfloat16", "grpo")])
def test_a_parked_state_comes_back_bit_for_bit_and_is_saved_meanwhile(
    tmp_path, moves, dtype, algorithm
):
    """``moves``: as if the device had memory of its own. With a reference, which stays as it was,
    and a critic, which is trained. The checkpoint is that of the state before, and the steps after
    are as undisturbed."""
    config = tiny_config(tmp_path, kl_coef=0.1, algorithm=algorithm)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    trainer, twin = Trainer(config, CPU), Trainer(config, CPU)
    stored = [p for _, p in trainer.state.named_parameters()]
    for parameter in (*stored, *trainer.gradients.frozen["reference"].parameters()):
        parameter.data = parameter.data.clone()  # a file's mapping has no storage to empty
    trainer._parked = ParkedMemory(CPU, moves=moves)
    assert ("critic" in trainer.state.parts) == (algorithm == "ppo")
    trainer.attach(tmp_path)
    trainer.restore("", 0, 0)
    for turn in range(3):
        for each in (trainer, twin):
            torch.manual_seed(turn)
            each.gradients.forwards.copies.refresh()
            for critic in (part for name, part in each.state.parts.items() if name != "policy"):
                for parameter in critic.parameters():
                    parameter.grad = torch.randn_like(parameter)
            synthetic_step(each.state)
            each.gradients.forwards.copies.stale = True
        before = all_bits(trainer.state)
        frozen = {n: p.clone() for n, p in trainer.gradients.frozen["reference"].named_parameters()}
        size = on_device(trainer)
        trainer.park()
        assert trainer.parked and on_device(trainer) == (0 if moves else size)
        saved = trainer.save().result().path
        trainer.unpark()
        assert not trainer.parked and on_device(trainer) == size
        assert_same_bits(all_bits(trainer.state), before)
        assert_same_bits(dict(trainer.gradients.frozen["reference"].named_parameters()), frozen)
        restored = tiny_state(config)
        reader = Checkpointer(tmp_path, config)
        reader.restore(restored, saved)
        reader.close()
        assert_same_bits(all_bits(restored), before)
    assert_same_bits(all_bits(trainer.state), all_bits(twin.state))
    trainer.close()


class Storage:
    """One on a device that has no room at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals, self.sizes, self._cdata = refusals, [], 0

    def resize_(self, size: int) -> None:
        if size and self.refusals:
            self.refusals -= 1
            raise torch.OutOfMemoryError
        self.sizes.append(size)


def test_a_turn_waits_for_memory_that_is_freed_late_and_takes_all_or_none(monkeypatch):
    """The process that had the device was killed, and its driver has not freed everything yet."""
    monkeypatch.setattr(parked_memory, "AGAIN_S", 0.0)
    monkeypatch.setattr(parked_memory, "_bytes_of", lambda storage: torch.zeros(1))
    parked = ParkedMemory(CPU)
    first, other = Storage(0), Storage(2)
    parked._empty, parked.parked = [(first, 8), (other, 8)], True
    parked.unpark()
    assert (first.sizes, other.sizes) == ([8, 0, 8, 0, 8], [0, 0, 8]) and not parked.parked
    parked._empty = [(Storage(1), 8)]
    with pytest.raises(StillInUse, match="another process computes there"):
        parked.unpark(limit_s=0.0)


@pytest.mark.parametrize("late", [0, 2, 1000])
def test_a_first_load_in_a_turn_waits_for_what_a_killed_process_had(monkeypatch, late):
    """For ever it does not: another process may have it, and the load says what is missing."""
    monkeypatch.setattr(parked_memory, "AGAIN_S", 0.0)
    total, reads = 80 << 30, []

    def read():
        reads.append(None)
        return (75 << 30 if len(reads) > late else 20 << 30), total

    parked_memory.await_room(read, limit_s=60.0 if late < 1000 else 0.0)
    assert len(reads) == (late + 1 if late < 1000 else 1)


def test_memory_that_was_dropped_comes_back_as_zeros():
    """Blocks of a fused matrix are filled by their owners, and what lies between them by nobody."""
    parked, dropped = ParkedMemory(CPU), torch.full((1000,), torch.nan)
    parked.park([dropped])
    others = [torch.full((1000,), torch.nan) for _ in range(9)]  # who computes there meanwhile
    del others
    parked.unpark()
    assert not dropped.any()


@pytest.mark.parametrize("constant", [False, True])
def test_memory_at_the_address_of_one_that_is_gone_has_a_copy_of_its_own(constant):
    parked = ParkedMemory(CPU, moves=True)
    for value, size in enumerate((8, 64, 8, 16)):
        tensor = torch.full((size,), float(value))
        before = tensor.clone()
        parked.copy(*([], [tensor]) if constant else [[tensor]])
        parked.park()
        parked.unpark()
        assert torch.equal(tensor, before) and len(parked._host) == 1
        del tensor


class Stream:
    """A stream's number of pieces of work, and how much of others' it comes after."""

    def __init__(self, name):
        self.name, self.work, self.after = name, 0, {"computing": 0, "copying": 0}

    def record_event(self):
        return {**self.after, self.name: self.work}

    def wait_event(self, event):
        self.after = {name: max(n, event[name]) for name, n in self.after.items()}


class Streams:
    """torch with the streams of a device, whose work is done at once: what comes after what is
    checked, and what may therefore be overwritten or read."""

    def __init__(self):
        self.computing, self.copying = Stream("computing"), Stream("copying")
        self.now, self.said, self.early = self.computing, [], []
        self.arrived, self.used = {}, {}
        """Number of the last copy to a memory, and of the last work on it."""
        self.cuda = SimpleNamespace(
            Stream=lambda device: self.copying,
            current_stream=lambda device: self.now,
            stream=self.on,
        )

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def empty(self, *shape, dtype, **place):
        return torch.empty(*shape, dtype=dtype)

    def empty_like(self, tensor, *, device):
        return torch.empty_like(tensor)

    def _foreach_copy_(self, targets, sources, non_blocking=False):
        assert self.now is self.copying and non_blocking
        number = self.copying.work = self.copying.work + 1
        for target, source in zip(targets, sources, strict=True):
            for memory in map(memory_of, (target, source)):
                assert self.copying.after["computing"] >= self.used.get(memory, 0), "in use"
            self.arrived[memory_of(target)] = number
            weakref.finalize(source, self.dropped, number)
        self.said.append("copy")
        torch._foreach_copy_(targets, sources)

    def dropped(self, number):
        """Its memory is used again by what computes from now on."""
        if self.computing.after["copying"] < number:
            self.early.append(number)

    def compute(self, block, given):
        number = self.computing.work = self.computing.work + 1
        for tensor in (*given, *block.parameters()):
            arrived = self.arrived.get(memory_of(tensor), 0)
            assert self.computing.after["copying"] >= arrived, "used before its copy was waited for"
            self.used[memory_of(tensor)] = number
        self.said.append("compute")

    def __getattr__(self, name):
        return getattr(torch, name)


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    for module in (host_memory, host_activations, host_weights):
        monkeypatch.setattr(module, "torch", found)
    monkeypatch.setattr(host_weights, "buffers_to", lambda model, device: None)
    return found


def test_the_weights_of_the_next_block_come_while_one_computes(streams):
    model = tiny_network("qwen3", layers=4).requires_grad_(False)
    micro = pack(decode(random_groups(2, group_size=2, seed=3)), torch.arange(4).numpy(), CPU)
    wanted = score(model, micro, 1.0).logprobs
    keep_on_host(model, blocks_of(model), CUDA)
    for block in blocks_of(model):
        block.register_forward_pre_hook(streams.compute)
    for _ in range(2):
        assert torch.equal(score(model, micro, 1.0).logprobs, wanted)
    # Of the last block of a row the next one is the first of the next row.
    assert streams.said == ["copy", *["copy", "compute"] * 8]
    host_weights.let_go(model)
    assert torch.equal(score(model, micro, 1.0).logprobs, wanted)
    assert streams.said[17:] == ["copy", *["copy", "compute"] * 4]


def test_activations_leave_and_come_back_while_a_block_computes(streams):
    model = tiny_network("qwen3", layers=6)
    micro = pack(decode(random_groups(2, group_size=2, seed=3)), torch.arange(4).numpy(), CPU)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in blocks_of(model):
        block.register_forward_pre_hook(streams.compute)
    found = []
    for activations in (None, HostActivations(CUDA)):
        model.zero_grad()
        streams.said.clear()
        with activations.of_row(micro.input_ids.shape[1]) if activations else nullcontext():
            logprobs = score(model, micro, 1.0).logprobs
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(map(torch.equal, *found))
    assert not streams.early
    # The input of a block leaves as it begins; in the backward pass that of the next one comes.
    assert streams.said[:12] == ["copy", "compute"] * 6
    assert streams.said[-11:] == [*["copy", "compute"] * 5, "compute"]
