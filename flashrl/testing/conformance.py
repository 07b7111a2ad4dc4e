"""What every engine adapter must do, as tests; see :mod:`flashrl.testing`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from flashrl.core.rollouts import SamplingParams
from flashrl.core.updates.quantized import quantize_tensors
from flashrl.errors import EngineStateError, VerificationError, WeightUpdateError
from flashrl.session import Session
from flashrl.testing.checkpoints import Checkpoint, make_checkpoint

__all__ = ["EngineConformance", "OpenSession"]

OpenSession = Callable[[Path, str], AbstractContextManager[Session]]
"""Opens an 8-bit session on a checkpoint folder, and ends the engine when the block ends."""

PROMPTS = [[5, 9, 17, 4], [30, 31, 32, 33, 34, 35, 36], [200]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(2,))


class EngineConformance:
    """Subclass it, override :meth:`open_session`, and narrow the class attributes if need be.

    Attributes:
        schemes: Schemes to run; each opens an engine of its own.
        architecture: A key of :data:`flashrl.testing.ARCHITECTURES`.
    """

    schemes: tuple[str, ...] = ("int8", "fp8_channel")
    architecture = "llama"

    # What a test holds: two checkpoints of one shape, and one engine that started from the first.

    @pytest.fixture(scope="class")
    @classmethod
    def open_session(cls) -> OpenSession:
        """Override this."""
        raise NotImplementedError("override the open_session fixture; see flashrl.testing")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoints(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ...]:
        """Checkpoints A and B."""
        folder = tmp_path_factory.mktemp(cls.architecture)
        return tuple(
            make_checkpoint(folder / name, cls.architecture, seed=seed)
            for seed, name in enumerate("ab")
        )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test that opens an engine once for each scheme."""
        if "scheme" in metafunc.fixturenames:
            metafunc.parametrize("scheme", self.schemes, scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def greedy_outputs(
        cls, open_session: OpenSession, checkpoints: tuple[Checkpoint, ...], scheme: str
    ) -> tuple[list[list[int]], ...]:
        """What a fresh engine says from each checkpoint."""
        outputs = []
        for checkpoint in checkpoints:
            with open_session(checkpoint.path, scheme) as fresh:
                outputs.append(generate_greedily(fresh))
        assert outputs[0] != outputs[1], "the checkpoints must not answer alike"
        return tuple(outputs)

    @pytest.fixture(scope="class")
    @classmethod
    def shared_session(
        cls, open_session: OpenSession, checkpoints: tuple[Checkpoint, ...], scheme: str
    ) -> Iterator[Session]:
        with open_session(checkpoints[0].path, scheme) as session:
            yield session

    @pytest.fixture
    def session(self, shared_session: Session, checkpoints: tuple[Checkpoint, ...]) -> Session:
        """The engine, holding A whatever the test before did to it."""
        shared_session.update_weights(checkpoints[0].named_tensors())
        return shared_session

    # The weights are right.

    def test_a_fresh_engine_holds_the_checkpoint(
        self, open_session: OpenSession, checkpoints: tuple[Checkpoint, ...], scheme: str
    ) -> None:
        with open_session(checkpoints[1].path, scheme) as fresh:
            assert fresh.verify(checkpoints[1].named_tensors()).ok
            assert fresh.version == 0

    def test_alternating_updates_equal_fresh_engines(
        self,
        session: Session,
        checkpoints: tuple[Checkpoint, ...],
        greedy_outputs: tuple[list[list[int]], ...],
    ) -> None:
        for step in range(1, 6):
            which = step % 2
            session.update_weights(checkpoints[which].named_tensors(), version=100 + step)
            assert session.version == 100 + step
            assert session.verify(checkpoints[which].named_tensors()).ok
            assert generate_greedily(session) == greedy_outputs[which]

    def test_weights_that_the_sender_quantized_equal_16_bit_ones(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        weights = dict(checkpoints[1].named_tensors())
        pushed = list(quantize_tensors(weights.items(), session.scheme))
        assert len(pushed) > len(weights)
        if not session.capabilities.quantized_pushes:
            with pytest.raises(WeightUpdateError, match="expected"):
                session.update_weights(pushed)
            assert session.version is None
            return
        for order in (pushed, pushed[::-1]):
            session.update_weights(order)
            assert session.verify(weights.items()).ok
            session.update_weights(checkpoints[0].named_tensors())
        scales = [name for name, _ in pushed if name not in weights]
        with pytest.raises(WeightUpdateError, match="without its scale") as caught:
            session.update_weights(pair for pair in pushed if pair[0] != scales[0])
        assert set(caught.value.faults) == {scales[0].removesuffix("_scale")}
        assert session.version is None

    def test_linears_are_8_bit_and_the_rest_is_not(self, session: Session) -> None:
        infos = session.engine.weights()
        quantized = {name for name, info in infos.items() if info.scheme is not None}
        assert any(name.endswith("q_proj.weight") for name in quantized)
        assert any(name.endswith("down_proj.weight") for name in quantized)
        for name in quantized:
            assert infos[name].dtype.itemsize == 1
            assert not any(word in name for word in ("norm", "embed", "lm_head", "bias"))

    def test_what_is_held_is_near_what_was_pushed(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """Independent of any reference: each element within one step of 8 bit."""
        infos = session.engine.weights()
        name = next(n for n in infos if n.endswith("layers.1.self_attn.o_proj.weight"))
        pushed = dict(checkpoints[0].named_tensors())[name].float()
        [(_, held)] = session.engine.read_weights([name])
        largest = pushed.abs().amax(dim=1, keepdim=True)
        step = largest / 127 if infos[name].dtype == torch.int8 else largest / 16
        assert bool(((held - pushed).abs() <= step).all())
        assert not torch.equal(held, pushed)

    @pytest.mark.parametrize("size", [1, 3, 10_000])
    def test_buckets_of_any_size_equal_one_push(
        self, session: Session, checkpoints: tuple[Checkpoint, ...], size: int
    ) -> None:
        """SkyRL#1680, verl#7136, #7978; Flash-RL's pruning failed on one tensor."""
        pairs = list(checkpoints[1].named_tensors())
        with session.update(version=7) as update:
            for start in range(0, len(pairs), size):
                update.push(pairs[start : start + size])
                assert session.version is None
        assert session.version == 7
        assert session.verify(pairs).ok

    def test_the_sender_may_reuse_its_buffer(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """verl#7327, #6454."""

        def through_one_buffer() -> Iterator[tuple[str, torch.Tensor]]:
            pairs = list(checkpoints[1].named_tensors())
            buffer = torch.empty(max(t.numel() for _, t in pairs), dtype=torch.bfloat16)
            for name, tensor in pairs:
                view = buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)
                yield name, view
                buffer.fill_(-77.0)

        session.update_weights(through_one_buffer())
        assert session.verify(checkpoints[1].named_tensors()).ok

    def test_order_does_not_matter(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        session.update_weights(reversed(list(checkpoints[1].named_tensors())))
        assert session.verify(checkpoints[1].named_tensors()).ok

    def test_the_same_weights_twice_change_nothing(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """vllm#48284."""
        names = list(session.engine.weights())
        once = dict(session.engine.read_weights(names))
        session.update_weights(checkpoints[0].named_tensors())
        twice = dict(session.engine.read_weights(names))
        assert all(torch.equal(once[name], twice[name]) for name in names)

    @pytest.mark.parametrize(
        "prefix", ["module.", "_orig_mod.", "base_model.model.", "_fsdp_wrapped_module."]
    )
    def test_names_may_carry_wrappers(
        self, session: Session, checkpoints: tuple[Checkpoint, ...], prefix: str
    ) -> None:
        session.update_weights((prefix + n, t) for n, t in checkpoints[1].named_tensors())
        assert session.verify(checkpoints[1].named_tensors()).ok

    def test_four_times_the_weight_is_four_times_the_weight(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """Flash-RL#30: a weight must never meet the scale of another."""
        name = "model.layers.0.self_attn.q_proj.weight"
        [(_, once)] = session.engine.read_weights([name])
        session.update_weights((n, 4 * t) for n, t in checkpoints[0].named_tensors())
        [(_, four)] = session.engine.read_weights([name])
        assert torch.allclose(four, 4 * once, rtol=1e-5)

    # What is wrong is said.

    def test_verify_names_a_perturbed_tensor(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """Flash-RL#34: "did it work?" has an answer."""
        name = "model.layers.1.mlp.down_proj.weight"
        if name not in session.engine.weights():
            name = "model.layers.1.self_attn.o_proj.weight"
        perturbed = dict(checkpoints[0].named_tensors())
        perturbed[name] = perturbed[name].clone()
        perturbed[name][0, 0] += 1.0
        with pytest.raises(VerificationError) as caught:
            session.verify(perturbed.items())
        assert caught.value.report is not None
        assert [c.name for c in caught.value.report.mismatches] == [name]
        assert name in str(caught.value)

    @pytest.mark.parametrize("fault", ["unknown", "shape", "missing", "nan", "inf", "int64"])
    def test_a_bad_push_is_named_and_the_engine_stays_usable(
        self,
        session: Session,
        checkpoints: tuple[Checkpoint, ...],
        greedy_outputs: tuple[list[list[int]], ...],
        fault: str,
    ) -> None:
        culprit = "model.layers.0.self_attn.k_proj.weight"
        pairs = [(n, t.clone()) for n, t in checkpoints[1].named_tensors()]
        with pytest.raises(WeightUpdateError) as caught:
            session.update_weights(_spoil(pairs, culprit, fault))
        message = str(caught.value)
        assert culprit in message
        if fault == "missing":
            assert caught.value.missing == (culprit,)
        elif fault == "unknown":
            assert any("mystery" in name for name in caught.value.faults)
        else:
            assert list(caught.value.faults) == [culprit]
        assert session.version is None
        with pytest.raises(VerificationError, match="did not complete"):
            session.verify(checkpoints[1].named_tensors())
        with pytest.raises(EngineStateError):
            session.generate(PROMPTS, GREEDY)
        session.update_weights(checkpoints[0].named_tensors())
        assert session.verify(checkpoints[0].named_tensors()).ok
        assert generate_greedily(session) == greedy_outputs[0]

    def test_missing_names_are_reported_once_at_the_end(
        self, session: Session, checkpoints: tuple[Checkpoint, ...]
    ) -> None:
        """vime#5."""
        pairs = list(checkpoints[0].named_tensors())
        left_out = {pairs[0][0], pairs[5][0]}
        with pytest.raises(WeightUpdateError) as caught, session.update() as update:
            for pair in pairs:
                if pair[0] not in left_out:
                    update.push([pair])
        assert set(caught.value.missing) == left_out

    # The log-probabilities are those of the distribution sampled.

    def test_rollouts_are_stamped_and_padded(self, session: Session) -> None:
        rollout = session.generate(PROMPTS, SamplingParams(max_tokens=6, seed=3))
        assert rollout.version == session.version
        assert rollout.response_ids.shape[0] == len(PROMPTS)
        mask = rollout.response_mask.bool()
        assert bool(mask[:, 0].all())
        assert not rollout.rollout_log_probs[~mask].any()
        assert bool((rollout.rollout_log_probs[mask] <= 0).all())
        assert bool(torch.isfinite(rollout.rollout_log_probs).all())

    def test_a_single_candidate_has_probability_one(self, session: Session) -> None:
        rollout = session.generate(PROMPTS, SamplingParams(top_k=1, max_tokens=4, seed=0))
        mask = rollout.response_mask.bool()
        assert torch.allclose(rollout.rollout_log_probs[mask], torch.zeros(1), atol=1e-5)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(max_tokens=1, temperature=0.7),
            SamplingParams(max_tokens=1, top_k=5),
            SamplingParams(max_tokens=1, top_p=0.8),
            SamplingParams(max_tokens=1, min_p=0.1, temperature=1.3),
        ],
        ids=["temperature", "top_k", "top_p", "min_p"],
    )
    def test_tokens_come_as_often_as_their_log_probs_say(
        self, session: Session, params: SamplingParams
    ) -> None:
        active = {
            name
            for name, on in (
                ("temperature", params.temperature != 1.0),
                ("top_k", params.top_k > 0),
                ("top_p", params.top_p < 1.0),
                ("min_p", params.min_p > 0.0),
            )
            if on
        }
        if not active <= session.capabilities.exact_log_probs:
            pytest.skip(f"the engine says it is not exact under {sorted(active)}")
        draws = 512
        rollout = session.generate([PROMPTS[0]] * draws, params)
        probability: dict[int, float] = {}
        counts: Counter[int] = Counter()
        for token, log_prob in zip(
            rollout.response_ids[:, 0].tolist(),
            rollout.rollout_log_probs[:, 0].tolist(),
            strict=True,
        ):
            counts[token] += 1
            known = probability.setdefault(token, math.exp(log_prob))
            assert math.exp(log_prob) == pytest.approx(known, rel=1e-2, abs=1e-4)
        assert sum(probability.values()) <= 1.0 + 1e-3
        for token, p in probability.items():
            five_sigma = 5 * math.sqrt(max(p * (1 - p), 1 / draws) / draws)
            assert abs(counts[token] / draws - p) <= five_sigma

    # The session says what it is.

    def test_describe_gives_facts(self, session: Session, scheme: str) -> None:
        facts = session.describe()
        assert facts["scheme"] == scheme
        assert facts["version"] == session.version
        assert facts["quantized_weights"] > 0

    def test_a_detached_session_says_so(
        self, open_session: OpenSession, checkpoints: tuple[Checkpoint, ...], scheme: str
    ) -> None:
        with open_session(checkpoints[0].path, scheme) as session:
            if not session.capabilities.detaches:
                pytest.skip("the engine says it cannot detach")
            session.detach()
            session.detach()
            with pytest.raises(EngineStateError, match="detached"):
                session.update_weights(checkpoints[0].named_tensors())


def generate_greedily(session: Session) -> list[list[int]]:
    """Greedy responses to the suite's prompts, without padding."""
    rollout = session.generate(PROMPTS, GREEDY)
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(rollout.response_ids, rollout.response_mask, strict=True)
    ]


def _spoil(
    pairs: list[tuple[str, torch.Tensor]], culprit: str, fault: str
) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in pairs:
        if name != culprit:
            yield name, tensor
        elif fault == "unknown":
            yield name.replace("k_proj", "mystery_proj"), tensor
        elif fault == "shape":
            yield name, tensor[:-1]
        elif fault == "int64":
            yield name, tensor.long()
        elif fault in ("nan", "inf"):
            tensor[-1, -1] = math.nan if fault == "nan" else math.inf
            yield name, tensor
