"""paged_attention on a GPU: how its work is cut and shared, its workspace, graphs and streams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import LAYOUTS, needs_cuda_library, raises
from late_indices import STALE, LateIndices
from paged_attention_cases import EIGHT_BITS, Case, assert_right, check, make_case

import vllm_kernels

pytestmark = needs_cuda_library
BF16 = torch.bfloat16
F16 = torch.float16
FP8 = torch.float8_e4m3fn


def lengths(count: int, most: int, *longer: int) -> list[int]:
    """`count` sequences of up to `most` tokens, some empty, the longer ones in between."""
    lens = torch.randint(0, most, (count,)).tolist()
    for i, length in enumerate(longer):
        lens[(i + 1) * count // (len(longer) + 1)] = length
    return lens


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stored", [None, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "lens",
    [
        lengths(3, 40, 9000),
        lengths(17, 700),
        lengths(80, 300, 5000, 3000),
        lengths(300, 100, 4000),
        lengths(1100, 20, 4000),  # more segments than slots
    ],
    ids=["few", "about_the_blocks", "more_than_blocks", "many", "no_room_for_pieces"],
)
def test_cuts(lens, stored, layout):
    """Fewer segments than blocks, about as many, more, and so many that none is split."""
    case = make_case("cuda", BF16, lens, heads=16, kv_heads=8, stored=stored, layout=layout)
    check(case)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuts_of_several_query_tokens(layout):
    lens = lengths(40, 600, 6000)
    queries = [min(length, i % 9) for i, length in enumerate(lens)]
    case = make_case(
        "cuda", BF16, lens, queries, heads=32, kv_heads=4, head_size=128, layout=layout
    )
    check(case)
    assert torch.equal(case.run(), case.run())


@pytest.mark.parametrize("kept", [[900, 33, 5, 4000], [0, 0, 2, 3999]], ids=["all", "padded"])
def test_graph_replays_with_other_lengths(kept):
    case = make_case("cuda", BF16, [900, 33, 5, 4000], heads=8, kv_heads=2, head_size=128)
    out = torch.empty_like(case.query)
    arguments = (*case.tensors()[:4], torch.ones_like(case.seq_lens))
    run = lambda: vllm_kernels.paged_attention(*arguments, out=out)  # noqa: E731
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # its workspace is made inside of the capture
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        run()
    arguments[4].copy_(torch.tensor(kept))
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_right(Case(*arguments, case.block_size, case.options), out)


def test_two_streams_at_once():
    cases = [
        make_case("cuda", BF16, lens, heads=8, kv_heads=2) for lens in ([9000, 5], [7000, 800])
    ]
    want = [case.run() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[index].append(cases[index].run())
    torch.cuda.synchronize()
    for index, expected in enumerate(want):
        assert all(torch.equal(result, expected) for result in got[index])


def test_workspace():
    case = make_case("cuda", BF16, [3000, 20])
    want = case.run()
    workspace = vllm_kernels.paged_attention_workspace("cuda")
    for _ in range(2):
        assert torch.equal(case.with_options(workspace=workspace).run(), want)
    for bad in (workspace[:4096], workspace[1:]):
        with raises(
            r"^paged_attention: workspace: expected at least 41943040 bytes, aligned to 256"
        ):
            case.with_options(workspace=bad).run()
    with raises(r"^paged_attention: (out and workspace|workspace and out) overlap"):
        out = workspace[: case.query.numel() * 2].view(BF16).view(case.query.shape)
        vllm_kernels.paged_attention(*case.tensors(), out=out, workspace=workspace)


@pytest.mark.parametrize("heads", [8, 32], ids=["warps", "teams"])
def test_pieces_of_zeros_arrive(heads):
    """Where no block has two items a piece says by words that are not 0 that it is there."""
    case = make_case("cuda", BF16, [9000, 3], heads=heads, kv_heads=2, head_size=128)
    for cache in (case.key_cache, case.value_cache):
        cache.zero_()
    out, lse = case.run_with_lse()
    assert not out.any()
    torch.testing.assert_close(lse, case.seq_lens.float().log()[:, None].expand_as(lse))


def test_pieces_are_taken_back():
    """A workspace serves batches of other shapes as a new one does: no piece is left in it."""
    posted = [
        ([9000], 8, 2, 128), ([5000, 70], 32, 2, 128), ([3000] * 3, 8, 8, 64), ([6000], 24, 8, 256),
        ([5000], 24, 2, 128), ([5000], 96, 2, 128), ([5000], 32, 2, 64), ([5000], 32, 2, 256),
    ]  # fmt: skip
    counted = [([20000] + [700] * 90, 8, 4, 128)]  # 91 x 4 segments: blocks have several items
    cases = [
        make_case("cuda", BF16, lens, heads=heads, kv_heads=kv_heads, head_size=head_size)
        for lens, heads, kv_heads, head_size in posted + counted
    ]
    shape = {"heads": 8, "kv_heads": 2, "head_size": 128}
    cases.append(make_case("cuda", BF16, [9000], stored=FP8, **shape))

    def parts(workspace):  # words of 16384 rows' maxima and sums, then outputs
        words = workspace[-(8 << 20) :].view(torch.int32)
        return words[: 2 * 16384], words[2 * 16384 :]

    want = []
    for index, case in enumerate(cases):
        workspace = vllm_kernels.paged_attention_workspace("cuda")
        want.append(case.with_options(workspace=workspace).run())
        stats, _ = parts(workspace)
        assert stats[1::2].any() == (index != len(posted)), "sums of posted pieces stay"
    shared = vllm_kernels.paged_attention_workspace("cuda")
    stats, out = parts(shared)
    order = [*range(len(cases)), *reversed(range(len(cases))), 0, 2, 0]
    for index in order:
        assert torch.equal(cases[index].with_options(workspace=shared).run(), want[index])
        assert not stats[::2].any()
        assert not out[::4].any()


@pytest.mark.parametrize(
    ("lens", "heads", "head_size"),
    [([9000] * 3, 8, 64), ([9000], 32, 128), ([20000], 128, 128), ([20000], 256, 128)],
    ids=["few_pieces", "warps", "16_rows", "32_rows"],
)
def test_last_pieces_are_shorter(lens, heads, head_size):
    """Those whose blocks merge the others, where segments are long: no token is left out."""
    case = make_case("cuda", BF16, lens, heads=heads, kv_heads=8, head_size=head_size)
    check(case)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size", "stored", "layout"),
    [
        (F16, 8, 128, None, "vllm"), (BF16, 8, 128, FP8, "vllm"), (F16, 32, 64, None, "vllm"),
        (F16, 96, 128, None, "vllm"), (F16, 32, 256, None, "vllm"), (BF16, 8, 128, None, "NHD"),
        (BF16, 8, 64, FP8, "HND"), (BF16, 32, 64, FP8, "HND"), (BF16, 32, 128, FP8, "vllm"),
        (BF16, 96, 128, FP8, "NHD"), (BF16, 32, 128, None, "NHD"), (BF16, 8, 96, FP8, "HND"),
        (BF16, 8, 80, None, "NHD"),
    ],
    ids=["warps", "fp8", "16_rows", "48_rows", "wide_teams", "warps_nhd", "fp8_lines",
         "16_rows_lines", "16_rows_fp8", "48_rows_fp8", "16_rows_nhd", "dense", "dense_boxes"],
)  # fmt: skip
def test_posted_and_counted_pieces_are_merged_alike(dtype, heads, head_size, stored, layout):
    """fixed_split_size: alone a sequence's pieces are posted, among many they are counted."""
    lens = [5000, 4500, 4000, 3500] + [1300] * 10  # pieces that a workspace holds of 64 rows
    case = make_case(
        "cuda", dtype, lens, heads=heads, kv_heads=2, head_size=head_size, stored=stored,
        layout=layout, fixed_split_size=256,
    )  # fmt: skip
    among = case.run_with_lse()
    for i in range(4):
        one = slice(i, i + 1)
        alone = replace(
            case, query=case.query[one], block_tables=case.block_tables[one],
            seq_lens=case.seq_lens[one],
        )  # fmt: skip
        for got, want in zip(alone.run_with_lse(), among, strict=True):
            assert torch.equal(got[0], want[i])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
@pytest.mark.parametrize("head_size", [80, 96, 112, 160, 192, 224])
def test_rows_of_no_whole_lines(dtype, head_size, stored, layout):
    """Rows that are multiplied as a page has them: pages shorter than a stage, and longer."""
    shapes = {"heads": 8, "kv_heads": 2, "head_size": head_size, "stored": stored}
    for block_size, lens in (
        (8, [1, 7, 8, 9, 500, 0]),
        (16, [4000, 15, 17, 0]),
        (32, lengths(80, 300, 5000)),
        (256, [255, 256, 257, 3000]),
    ):
        case = make_case("cuda", dtype, lens, block_size=block_size, layout=layout, **shapes)
        check(case)
        assert torch.equal(case.run(), case.run())
        check(case.with_options(sliding_window=70, softcap=20.0))
    # Slices of a tensor of K and V.
    packed = torch.stack([case.key_cache, case.value_cache], 1)
    sliced = replace(case, key_cache=packed[:, 0], value_cache=packed[:, 1])
    assert torch.equal(sliced.run(), case.run())


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
@pytest.mark.parametrize("head_size", [144, 160, 192, 256])
def test_large_pages_of_wide_heads(head_size, stored):
    """Two warps share a stage of 32 tokens, in a batch."""
    shapes = {"heads": 8, "kv_heads": 2, "head_size": head_size, "stored": stored}
    for block_size, lens in (
        (32, [1, 15, 16, 17, 31, 32, 33, 0] * 2),
        (64, lengths(80, 300, 5000)),
        (256, [255, 256, 257, 3000] * 4),
        (64, [5000, 47]),  # few tiles: stages of 16 tokens
    ):
        case = make_case("cuda", BF16, lens, block_size=block_size, **shapes)
        check(case)
        assert torch.equal(case.run(), case.run())
        assert torch.equal(case.with_options(kv_ready=True).run(), case.run())
        check(case.with_options(sliding_window=70, softcap=20.0))
        slopes = torch.linspace(0.1, 1, 8, device="cuda")
        check(case.with_options(alibi_slopes=slopes, sinks=slopes))
        if torch.cuda.get_device_capability() == (9, 0):
            assert ("two warps a stage" in case.explained()) == (len(lens) > 2)
    lens = [3000, 2, 40, 700] * 4
    check(make_case("cuda", BF16, lens, [2, 1, 2, 2] * 4, block_size=32, **shapes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("head_size", "stored", "block_size"),
    [(128, None, 16), (80, None, 16), (96, FP8, 16), (256, FP8, 32)],
    ids=["128", "80", "96_fp8", "256_fp8"],
)
def test_bad_rows_are_contained(head_size, stored, block_size, layout):
    """A length or block id out of range changes nothing but its own sequence."""
    lens = [50, 4000, 200, 7]
    kv_heads = 8 if head_size == 256 else 2  # enough query tiles for stages that two warps share
    shapes = {"heads": 4 * kv_heads, "kv_heads": kv_heads, "head_size": head_size, "stored": stored}
    case = make_case("cuda", BF16, lens, layout=layout, block_size=block_size, **shapes)
    want = case.run()
    width = case.block_tables.shape[1] * case.block_size
    for index, length in ((0, -5), (1, 2**31 - 1), (2, width + 1)):
        broken = case.seq_lens.clone()
        broken[index] = length
        got = replace(case, seq_lens=broken).run()
        for other in set(range(4)) - {index}:
            torch.testing.assert_close(got[other], want[other], rtol=2**-6, atol=2**-6)
        if length < 0:
            assert not got[index].any()
    for bad in (-1, 2**31 - 1, -(2**31)):
        tables = case.block_tables.clone()
        tables[1, 3] = bad
        got = replace(case, block_tables=tables).run()
        assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]])
        assert not got[1].isnan().any()


@pytest.mark.parametrize(
    ("heads", "query_len"), [(8, 1), (32, 2), (32, 200)], ids=["warps", "teams", "prefill"]
)
@pytest.mark.parametrize("end", [-5, -(2**31)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bad_starts_are_contained(layout, end, heads, query_len):
    """A sequence that begins behind the query and ends before it has no tokens."""
    shapes = {"heads": heads, "kv_heads": 2, "head_size": 128, "layout": layout}
    queries = [query_len] * 3 + [1]  # with 200, the last one has a launch beside the others'
    case = make_case("cuda", BF16, [250, 300, 4000, 700], queries, **shapes)
    want = case.run()
    starts = case.options["query_start_loc"].clone()
    starts[:2] = torch.tensor([2**31 - 1, end])
    broken = case.with_options(query_start_loc=starts)
    got = vllm_kernels.paged_attention(*broken.tensors(), **broken.options, max_query_len=query_len)
    bound = {"rtol": 2**-6, "atol": 2**-6}  # other pieces
    torch.testing.assert_close(got[2 * query_len :], want[2 * query_len :], **bound)


@pytest.mark.parametrize("queries, most", [([2, 3, 1], 1), ([40, 5, 17], 16), ([300, 200, 1], 150)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_past_max_query_len_are_zero(layout, queries, most):
    """A sequence is longer than promised: its first tokens are right, the others are 0."""
    shapes = {"heads": 32, "kv_heads": 2, "head_size": 128, "layout": layout}
    case = make_case("cuda", BF16, [350, 240, 29], queries, **shapes)
    shape = case.query.shape
    out = torch.full_like(case.query, float("nan"))
    lse = torch.full(shape[:2], 7.0, device="cuda")
    torch.ops.vllm_kernels.paged_attention(
        out, lse, *case.tensors(), case.options["query_start_loc"], shape[-1] ** -0.5, None, 0, 0.0,
        None, None, None, layout, most, None, zero_unowned=True,
    )  # fmt: skip
    first = 0
    for count in queries:
        end = first + min(count, most)
        assert (lse[first:end] > -torch.inf).all() and not out[first:end].isnan().any()
        assert not out[end : first + count].any() and (lse[end : first + count] == -torch.inf).all()
        first += count


@pytest.mark.parametrize("starts", [[0, 3, 7, 0, 0], [2**31 - 1, 2**31 - 1, 3, 7, 10]])
def test_padded_starts_take_no_rows_of_others(starts):
    """Starts that fall to 0 behind the last sequence: those before keep their rows."""
    case = make_case("cuda", BF16, [30, 50, 40, 20], [3, 4, 2, 1], heads=8, kv_heads=2)
    want = case.run()
    broken = case.with_options(query_start_loc=torch.tensor(starts, device="cuda").int())
    got = vllm_kernels.paged_attention(*broken.tensors(), **broken.options, max_query_len=4)
    right = slice(0, 7) if starts[0] == 0 else slice(9, 10)
    torch.testing.assert_close(got[right], want[right], rtol=2**-6, atol=2**-6)


def test_fixed_split_size_need_slots():
    """Whether every piece has one follows from the table's width: lengths are on the device."""
    case = make_case("cuda", BF16, [900, 33], heads=8, kv_heads=2).with_options(fixed_split_size=16)
    case.run()
    wide = torch.zeros(2, 1 << 20, dtype=torch.int32, device="cuda")
    wide[:, : case.block_tables.shape[1]] = case.block_tables
    with raises(
        r"paged_attention: fixed_split_size: block_tables has room for sequences of 16777216 "
        r"tokens, up to \d+ splits, and the workspace holds \d+: use a longer split, or slice "
        r"block_tables to the longest sequence"
    ):
        replace(case, block_tables=wide).run()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_of_overlapping_sequences_stay_in_the_workspace(layout):
    """A query_start_loc that falls: more pieces than the launcher can know of, so none is cut."""
    alone = make_case("cuda", BF16, [1024], [64], heads=8, kv_heads=1, head_size=128, layout=layout)
    size = vllm_kernels.paged_attention_workspace("cuda").numel()
    workspace = torch.zeros(size + (64 << 20), dtype=torch.uint8, device="cuda")
    workspace[size:] = 85
    many = replace(
        alone,
        block_tables=alone.block_tables.expand(300, -1).contiguous(),
        seq_lens=alone.seq_lens.expand(300).contiguous(),
    ).with_options(
        query_start_loc=torch.tensor([0, 64] * 150 + [0], dtype=torch.int32, device="cuda"),
        fixed_split_size=512,
        workspace=workspace,
    )
    for _ in range(2):  # the second time with the counters as the first left them
        assert_right(alone, many.run())
        assert (workspace[size:] == 85).all()


@pytest.mark.parametrize("kv_ready", [False, True], ids=["default", "kv_ready"])
def test_behind_a_kernel_that_writes_the_query(kv_ready):
    """Programmatic dependent launch: what the kernel before writes is read after it has ended."""
    case = make_case("cuda", BF16, [900, 33, 4000], heads=8, kv_heads=2, head_size=128)
    case = case.with_options(kv_ready=kv_ready)
    query = case.query
    weight = torch.ones(128, dtype=BF16, device="cuda")
    normed = torch.empty_like(query)
    vllm_kernels.rms_norm(normed, query, weight, 1e-6)
    want = replace(case, query=normed.clone()).run()
    for _ in range(20):
        normed.fill_(float("nan"))
        out = torch.full_like(query, float("nan"))
        vllm_kernels.rms_norm(normed, query, weight, 1e-6)  # and no kernel in between
        vllm_kernels.paged_attention(normed, *case.tensors()[1:], **case.options, out=out)
        assert torch.equal(out, want)


@pytest.mark.parametrize("stale", ["seq_lens", "block_tables", "query_start_loc", STALE])
@pytest.mark.parametrize(
    "heads, kv_heads, lens, head_size, stored",
    [
        (8, 2, [900, 33, 4000], 128, None),
        (8, 2, [240] * 4, 128, None),
        (32, 8, [26000, 33, 4000], 128, None),
        (32, 2, [26000, 33, 4000], 128, None),
        (64, 2, [900, 33, 4000], 128, None),
        (32, 8, [700] * 32, 128, None),
        (8, 2, [100 + i for i in range(250)], 128, None),
        (8, 2, [900, 33, 4000], 64, FP8),
        (8, 2, [900, 33, 4000], 96, FP8),
        (8, 2, [900, 33, 4000], 80, None),
        (32, 8, [26000, 33, 4000], 128, FP8),
        (8, 2, [100 + i for i in range(120)], 128, FP8),
    ],
    ids=[
        "8_rows",
        "8_rows_few",
        "8_rows_long",
        "32_rows_long",
        "64_rows",
        "8_rows_of_32",
        "8_rows_of_250",
        "fp8",
        "fp8_dense",
        "dense",
        "fp8_long",
        "fp8_of_120",
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_behind_a_kernel_that_writes_the_indices(
    layout, heads, kv_heads, lens, head_size, stored, stale
):
    """A batch's work is guessed early, from indices that a long copy replaces at its end."""
    queries = [2 if i == 1 else 1 for i in range(len(lens))]
    if len(lens) > 32:  # more are guessed only where each has one query token
        queries = None
    case = make_case(
        "cuda", BF16, lens, queries, heads=heads, kv_heads=kv_heads, head_size=head_size,
        layout=layout, stored=stored,
    )  # fmt: skip
    want = case.run()
    new = {"seq_lens": case.seq_lens, "block_tables": case.block_tables}
    if queries is not None:
        new["query_start_loc"] = case.options["query_start_loc"]
    late = LateIndices(new)
    old = {name: value.flip(0) for name, value in new.items() if name == stale}
    if "query_start_loc" in old:
        old[stale] = new[stale].clamp(max=len(lens)) + 1
    behind = replace(
        case, seq_lens=late.views["seq_lens"], block_tables=late.views["block_tables"]
    ).with_options(**{name: late.views[name] for name in new if name in case.options})
    for _ in range(5):
        out = torch.full_like(case.query, float("nan"))
        late.begin_copy(old or late.garbage())
        vllm_kernels.paged_attention(  # and no kernel in between
            *behind.tensors(), **behind.options, max_query_len=behind.max_query_len, out=out
        )
        assert torch.equal(out, want)
