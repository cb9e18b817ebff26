"""The native gated delta rule against Hugging Face's reference, and its forward modes against each other."""

import inspect
import pkgutil
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from server_ext.cpu import gdn, gdn_launches, substitutes

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 8
CHANNELS, WIDTH = 24, 4
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# A decay per head whose memory spans from a few to some hundred tokens.
A_LOG, DT_BIAS = torch.linspace(-5, 1, VALUE_HEADS), torch.linspace(-1, 1, VALUE_HEADS)
# Options of a target that nothing on the engine's path sets.
UNUSED = {"fused_gdn_gating": {"beta", "threshold"}, "fused_sigmoid_mul": {"quant"}}
KERNEL = gdn_launches.NativeGDNKernel()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def projections(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random inputs of the rule for one packed batch: ``[tokens, heads(, dim)]``."""
    sizes = {
        "q": (KEY_HEADS, KEY_DIM),
        "k": (KEY_HEADS, KEY_DIM),
        "v": (VALUE_HEADS, VALUE_DIM),
        "a": (VALUE_HEADS,),
        "b": (VALUE_HEADS,),
    }
    return {name: torch.randn(tokens, *size).to(dtype) for name, size in sizes.items()}


def state_pool(slots: int = 6) -> torch.Tensor:
    return torch.randn(slots, VALUE_HEADS, VALUE_DIM, KEY_DIM)


def cut(x: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: value[start:stop] for name, value in x.items()}


def reference_gates(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As in the reference's layer, where the two lines stand inside ``forward``."""
    return -A_LOG.exp() * torch.nn.functional.softplus(x["a"].float() + DT_BIAS), x["b"].sigmoid()


def reference_rule(rule, x: dict[str, torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence through a reference function; it keeps states as ``[K, V]``."""
    g, beta = reference_gates(x)
    q, k = (x[name].repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=1)[None] for name in "qk")
    output, final = rule(
        q,
        k,
        x["v"][None],
        g=g[None],
        beta=beta[None],
        initial_state=state.transpose(-1, -2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0], final[0].transpose(-1, -2)


def extend(x: dict[str, torch.Tensor], states: torch.Tensor, slots: list[int], lengths: list[int], **track):
    """Run the kernel's extend over packed sequences; returns ``[tokens, heads, V]``."""
    g, beta = gdn_launches.fused_gdn_gating(A_LOG, x["a"], x["b"], DT_BIAS)
    output, _, _ = KERNEL.extend(
        *(x[name][None] for name in "qkv"),
        g,
        beta,
        ssm_states=states,
        cache_indices=torch.tensor(slots),
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        **track,
    )
    return output[0]


def decode(x: dict[str, torch.Tensor], states: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """Run the kernel's decode for one token per slot; returns ``[requests, heads, V]``."""
    return KERNEL.decode(
        *(x[name][None] for name in "qkv"),
        x["a"],
        x["b"],
        A_log=A_LOG,
        dt_bias=DT_BIAS,
        ssm_states=states,
        cache_indices=torch.tensor(slots),
    )[0]


def verify(x: dict[str, torch.Tensor], states: torch.Tensor, slots: list[int], saved: torch.Tensor, rows: list[int]):
    """Run the kernel's target verify over equal blocks; returns ``[tokens, heads, V]``."""
    block = x["q"].shape[0] // len(slots)
    return KERNEL.target_verify(
        A_LOG,
        DT_BIAS,
        *(x[name][None] for name in "qkv"),
        x["a"],
        x["b"],
        ssm_states=states,
        cache_indices=torch.tensor(slots),
        query_start_loc=torch.arange(0, len(slots) * block + 1, block),
        intermediate_states_buffer=saved,
        intermediate_state_indices=torch.tensor(rows),
    )[0]


def test_gates_equal_the_reference() -> None:
    x = projections(50, torch.bfloat16)
    g, beta = gdn_launches.fused_gdn_gating(A_LOG, x["a"], x["b"], DT_BIAS)
    expected_g, expected_beta = reference_gates(x)
    assert g.dtype == torch.float32
    assert torch.equal(g[0], expected_g)
    assert beta.dtype == torch.bfloat16
    assert torch.equal(beta[0], expected_beta)


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
@pytest.mark.parametrize("name", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
def test_extend_equals_the_reference(name: str, tokens: int) -> None:
    x, states = projections(tokens), state_pool()
    expected, final = reference_rule(getattr(reference, name), x, states[2])
    output = extend(x, states, [2], [tokens])
    torch.testing.assert_close(output, expected, **CLOSE)
    torch.testing.assert_close(states[2], final, **CLOSE)


def test_extend_in_bfloat16_rounds_where_the_reference_does() -> None:
    x, states = projections(150, torch.bfloat16), state_pool()
    expected, final = reference_rule(reference.torch_chunk_gated_delta_rule, x, states[2])
    output = extend(x, states, [2], [150])
    assert output.dtype == torch.bfloat16
    # The float32 results differ in their last bits, so a few land on the other side of a rounding boundary.
    assert (output != expected).float().mean() < 0.01
    torch.testing.assert_close(states[2], final, **CLOSE)


def test_extend_of_a_packed_batch_equals_each_sequence_alone() -> None:
    lengths, slots = [5, 130, 1, 64], [4, 0, 3, 1]
    x, states = projections(sum(lengths)), state_pool()
    alone = states.clone()
    output = extend(x, states, slots, lengths)
    start = 0
    for slot, length in zip(slots, lengths, strict=True):
        own = extend(cut(x, start, start + length), alone, [slot], [length])
        torch.testing.assert_close(output[start : start + length], own, **CLOSE)
        start += length
    torch.testing.assert_close(states, alone, **CLOSE)


@pytest.mark.parametrize("splits", [[64, 64, 72], [1, 199], [100, 100], [65, 63, 72], [1] * 3 + [197]])
def test_extend_in_pieces_equals_extend_at_once(splits: list[int]) -> None:
    x, states = projections(200), state_pool()
    pieces = states.clone()
    output = extend(x, states, [3], [200])
    start, parts = 0, []
    for length in splits:
        parts.append(extend(cut(x, start, start + length), pieces, [3], [length]))
        start += length
    torch.testing.assert_close(torch.cat(parts), output, **CLOSE)
    torch.testing.assert_close(pieces, states, **CLOSE)


def test_decode_steps_equal_extend() -> None:
    steps, slots = 70, [5, 0, 2]
    x, states = projections(steps * len(slots)), state_pool()
    extended = states.clone()
    by_request = {name: value.unflatten(0, (len(slots), steps)) for name, value in x.items()}
    outputs = [decode({n: value[:, t] for n, value in by_request.items()}, states, slots) for t in range(steps)]
    expected = extend(x, extended, slots, [steps] * len(slots)).unflatten(0, (len(slots), steps))
    torch.testing.assert_close(torch.stack(outputs, dim=1), expected, **CLOSE)
    torch.testing.assert_close(states, extended, **CLOSE)


@pytest.mark.parametrize(("tokens", "chunk"), [(100, 1), (200, 0), (200, 2), (129, 2)])
def test_extend_snapshots_the_state_at_a_chunk_boundary(tokens: int, chunk: int) -> None:
    x, states = projections(30 + tokens), state_pool()
    until = states.clone()
    tracked = torch.full((2, *states.shape[1:]), float("nan"))
    extend(x, states, [1, 4], [30, tokens], track_state=tracked, track_chunk_idx=torch.tensor([-1, chunk]))
    if chunk:
        extend(cut(x, 30, 30 + chunk * gdn.CHUNK_TOKENS), until, [4], [chunk * gdn.CHUNK_TOKENS])
    torch.testing.assert_close(tracked[1], until[4], **CLOSE)
    assert tracked[0].isnan().all()


@pytest.mark.parametrize("accepted", [[1, 8], [3, 5]])
def test_verify_and_commit_equal_decode_of_the_accepted_tokens(accepted: list[int]) -> None:
    block, slots, rows = 8, [4, 1], [0, 1]
    x, states = projections(block * 2), state_pool()
    untouched, decoded = states.clone(), states.clone()
    saved = torch.zeros(3, block, *states.shape[1:])
    output = verify(x, states, slots, saved, rows).unflatten(0, (2, block))
    assert torch.equal(states, untouched), "verify must leave the pool alone until the commit"

    blocks = {name: value.unflatten(0, (2, block)) for name, value in x.items()}
    for request, count in enumerate(accepted):
        for t in range(count):
            step = {name: value[request, t, None] for name, value in blocks.items()}
            own = decode(step, decoded, [slots[request]])
            torch.testing.assert_close(output[request, t], own[0], **CLOSE)
    commit(states[None], saved[None], slots, [count - 1 for count in accepted])
    torch.testing.assert_close(states, decoded, **CLOSE)


def commit(pool: torch.Tensor, saved: torch.Tensor, slots: list[int], steps: list[int], **options) -> None:
    """Commit through the engine's entry point, with this pool in both the temporal and the convolution's place."""
    caches = SimpleNamespace(
        temporal=pool, intermediate_ssm=saved, conv=[pool.clone()], intermediate_conv_window=[saved.clone()]
    )
    options = {"mamba_track_indices": None, "mamba_steps_to_track": None, **options}
    gdn_launches.scatter_mamba_states_after_mtp_verify(caches, torch.tensor(slots), torch.tensor(steps), **options)
    assert torch.equal(caches.conv[0], pool)


def test_commit_writes_snapshots_that_are_due_and_nothing_else() -> None:
    pool, saved = torch.zeros(2, 7, 3), torch.randn(2, 4, 8, 3)
    commit(
        pool,
        saved,
        [6, 2, 1],
        [7, 0, -1],
        mamba_track_indices=torch.tensor([5, 4, -1]),
        mamba_steps_to_track=torch.tensor([3, -1, 2]),
    )
    expected = torch.zeros_like(pool)
    expected[:, 6], expected[:, 2], expected[:, 5] = saved[:, 0, 7], saved[:, 1, 0], saved[:, 0, 3]
    assert torch.equal(pool, expected)


def test_commit_reads_the_rows_it_is_given() -> None:
    pool, saved = torch.zeros(2, 7, 3), torch.randn(2, 4, 8, 3)
    commit(pool, saved, [6], [2], src_indices_raw=torch.tensor([3]))
    assert torch.equal(pool[:, 6], saved[:, 3, 2])


def test_decode_snapshots_copy_the_masked_requests() -> None:
    conv, ssm = torch.randn(2, 6, 3), torch.randn(2, 6, 4, 4)
    expected = {id(pool): pool.clone() for pool in (conv, ssm)}
    gdn_launches.track_mamba_states_all_layers(
        conv, ssm, torch.tensor([1, 2, 3]), torch.tensor([True, False, True]), torch.tensor([4, 0, 5]), 3
    )
    for pool in (conv, ssm):
        before = expected[id(pool)]
        assert torch.equal(pool[:, [4, 5]], before[:, [1, 3]])
        assert torch.equal(pool[:, :4], before[:, :4])


class TestConvolution:
    @pytest.fixture
    def weight(self) -> torch.Tensor:
        return torch.randn(CHANNELS, WIDTH).bfloat16()

    @staticmethod
    def sequence(tokens: int) -> torch.Tensor:
        return torch.randn(tokens, CHANNELS).bfloat16()

    @staticmethod
    def pool() -> torch.Tensor:
        return torch.randn(6, CHANNELS, WIDTH - 1).bfloat16()

    @staticmethod
    def extend(x: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor, slots, lengths, continues) -> torch.Tensor:
        return gdn_launches.causal_conv1d_fn(
            x.t(),
            weight,
            None,
            activation="silu",
            conv_states=pool,
            has_initial_state=torch.tensor(continues),
            cache_indices=torch.tensor(slots),
            query_start_loc=torch.tensor([0, *lengths]).cumsum(0),
        ).t()

    @pytest.mark.parametrize("tokens", [1, 2, 3, 40])
    def test_from_nothing_equals_the_reference(self, weight: torch.Tensor, tokens: int) -> None:
        x, pool = self.sequence(tokens), self.pool()
        expected = reference.causal_conv1d_fn(x.t()[None], weight, None, activation="silu")[0].t()
        assert torch.equal(self.extend(x, weight, pool, [2], [tokens], [False]), expected)
        padded = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), x])[-(WIDTH - 1) :]
        assert torch.equal(pool[2], padded.t().bfloat16())

    def test_decode_equals_the_reference(self, weight: torch.Tensor) -> None:
        x, pool = self.sequence(3), self.pool()
        slots = torch.tensor([5, 0, 2])
        history = pool[slots].clone()
        expected = reference.causal_conv1d_update(x[..., None], history, weight, None, activation="silu")
        output = gdn_launches.causal_conv1d_update(x, pool, weight, None, "silu", conv_state_indices=slots)
        assert torch.equal(output, expected[..., 0])
        assert torch.equal(pool[slots], history)

    @pytest.mark.parametrize("splits", [[1, 1, 1, 17], [2, 18], [10, 10]])
    def test_in_pieces_equals_at_once(self, weight: torch.Tensor, splits: list[int]) -> None:
        x, pool = self.sequence(20), self.pool()
        pieces = pool.clone()
        expected = self.extend(x, weight, pool, [1], [20], [False])
        parts, start = [], 0
        for length in splits:
            part = x[start : start + length]
            parts.append(self.extend(part, weight, pieces, [1], [length], [start > 0]))
            start += length
        assert torch.equal(torch.cat(parts), expected)
        assert torch.equal(pieces, pool)

    def test_packed_batch_equals_each_sequence_alone(self, weight: torch.Tensor) -> None:
        lengths, slots, continues = [2, 9, 1], [3, 0, 5], [True, False, True]
        x, pool = self.sequence(sum(lengths)), self.pool()
        alone = pool.clone()
        output = self.extend(x, weight, pool, slots, lengths, continues)
        parts = [
            self.extend(part, weight, alone, [slot], [len(part)], [own])
            for part, slot, own in zip(x.split(lengths), slots, continues, strict=True)
        ]
        assert torch.equal(output, torch.cat(parts))
        assert torch.equal(pool, alone)

    @pytest.mark.parametrize("overlapping", [False, True], ids=["dense windows", "overlapping windows"])
    def test_verify_saves_the_history_after_each_token(self, weight: torch.Tensor, overlapping: bool) -> None:
        """SGLang shares the memory of neighbouring windows of a chain; both layouts must hold the same."""
        requests, block, slots, rows = 2, 8, torch.tensor([4, 1]), torch.tensor([0, 1])
        x, pool = self.sequence(requests * block), self.pool()
        untouched, decoded = pool.clone(), pool.clone()
        windows = torch.zeros(3, block, CHANNELS, WIDTH - 1).bfloat16()
        if overlapping:
            buffer = torch.zeros(3, CHANNELS, block + WIDTH - 2).bfloat16()
            windows = buffer.as_strided(windows.shape, (buffer.stride(0), 1, buffer.stride(1), 1))
        channels_first = x.view(requests, block, -1).transpose(1, 2)
        output = gdn_launches.causal_conv1d_update(
            channels_first,
            pool,
            weight,
            None,
            "silu",
            conv_state_indices=slots,
            intermediate_conv_window=windows,
            intermediate_state_indices=rows,
        )
        assert torch.equal(pool, untouched), "verify must leave the pool alone until the commit"
        packed = output.transpose(1, 2).view(requests, block, -1)
        for t in range(block):
            step = gdn_launches.causal_conv1d_update(
                x.view(requests, block, -1)[:, t], decoded, weight, None, "silu", conv_state_indices=slots
            )
            assert torch.equal(packed[:, t], step)
            assert torch.equal(windows[rows, t], decoded[slots])


def test_gated_norm_equals_the_reference() -> None:
    norm = reference.Qwen3_5RMSNormGated(VALUE_DIM).bfloat16()
    norm.weight.data.normal_()
    x, gate = torch.randn(2, 30, VALUE_DIM).bfloat16()
    output = gdn_launches.rms_norm_gated(
        x=x,
        weight=norm.weight,
        bias=None,
        z=gate.view(15, 2, VALUE_DIM),
        eps=norm.variance_epsilon,
        group_size=None,
        norm_before_gate=True,
        is_rms_norm=True,
        activation="swish",
    )
    assert torch.equal(output, norm(x, gate))


def test_projections_split_into_their_parts() -> None:
    widths = {"q": 32, "k": 32, "v": 32, "z": 32}
    qkvz, ba = torch.randn(5, sum(widths.values())), torch.randn(5, 2 * VALUE_HEADS)
    qkv, z, b, a = gdn_launches.fused_qkvzba_split_reshape_cat_contiguous(
        qkvz, ba, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    assert torch.equal(qkv, qkvz[:, :96])
    assert torch.equal(z.flatten(1), qkvz[:, 96:])
    assert z.shape == (5, VALUE_HEADS, VALUE_DIM)
    assert torch.equal(torch.cat([b, a], dim=1), ba)


def test_attention_output_is_gated_as_in_the_reference() -> None:
    output, gate = torch.randn(2, 5, 12).bfloat16()
    expected = output * torch.sigmoid(gate)
    assert torch.equal(gdn_launches.fused_sigmoid_mul(output, gate.view(5, 3, 4)), expected)
    assert gdn_launches.fused_sigmoid_mul(output, gate, inplace=True) is output
    assert torch.equal(output, expected)


SUBSTITUTES = {
    hook.target: hook.function for hook in substitutes.HOOKS if hook.function.__module__ == gdn_launches.__name__
}


@pytest.mark.parametrize("path", sorted(path for path in SUBSTITUTES if path.startswith("sglang.")))
def test_a_substitute_takes_every_call_its_target_takes(path: str) -> None:
    target = inspect.signature(pkgutil.resolve_name(path)).parameters
    own = inspect.signature(SUBSTITUTES[path]).parameters
    names = [name for name, parameter in own.items() if parameter.kind is not parameter.VAR_KEYWORD]
    takes_more = len(names) < len(own)
    assert set(names) <= set(target)
    positional = [name for name in names if own[name].kind is own[name].POSITIONAL_OR_KEYWORD]
    assert positional == list(target)[: len(positional)], "the order of positional parameters differs"
    assert takes_more or set(names) == set(target) - UNUSED.get(path.rsplit(".", 1)[1], set())
