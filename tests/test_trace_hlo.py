"""The collectives of a compiled program, read from its text: each form that XLA writes, and what JAX compiles."""

import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest

from lecture_lib.trace import Ledger, hlo_ledger, side_by_side
from lecture_lib.trace.calls import Call
from lecture_lib.trace.hlo import groups_of, kind_of

HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=8\n\n"
PAIRS, ROWS = ((0, 4), (1, 5), (2, 6), (3, 7)), ((0, 1, 2, 3), (4, 5, 6, 7))


def program(*lines: str, head: str = HEAD) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{head}ENTRY %main (p: f32[8,64]) -> f32[8,64] {{\n  %p = f32[8,64]{{1,0}} parameter(0)\n{body}\n}}\n"


def only(*lines: str):
    (call,) = hlo_ledger(program(*lines)).calls
    return call


@pytest.mark.parametrize(
    "line, name, elements, sent",
    [
        ("f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", "all_reduce", 512, 3072),
        ("f32[8,64]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add", "all_reduce", 512, 3584),
        ("f32[32,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all_gather", 512, 6144),
        ("f32[2,64]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], to_apply=%add", "reduce_scatter", 512, 1536),
        ("f32[8,64]{1,0} all-to-all(%p), replica_groups=[4,2]<=[8], dimensions={0}", "all_to_all", 512, 1024),
        ("f32[8,64]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "collective_permute", 512, 2048),
        ("f32[8,64]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}", "collective_permute", 512, 0),
        ("f32[8,64]{1,0} collective-broadcast(%p), replica_groups={{0,1}}", "collective_broadcast", 512, 2048),
    ],
)
def test_each_kind_is_counted_as_the_ledger_counts_it(line, name, elements, sent):
    call = only(f'ROOT %c.1 = {line}, metadata={{op_name="jit(<lambda>)/f" stack_frame_id=4}}')
    assert (call.name, call.elements, call.bytes_sent, call.in_loop) == (name, elements, sent, False)
    assert call.shapes == ("f32[8,64]",)


def test_a_share_that_is_no_whole_number_stays_exact():
    groups = "replica_groups=[2,4]<=[8]"
    short = hlo_ledger(program("%x = bf16[3]{0} slice(%p)", f"%a = bf16[3]{{0}} all-reduce(%x), {groups}"))
    assert short.calls[0].bytes_sent == Fraction(2 * 3 * 6, 4) and short.bytes_sent == 9
    odd = hlo_ledger(program("%x = u8[1]{0} slice(%p)", f"%a = u8[1]{{0}} all-reduce(%x), {groups}"))
    assert odd.calls[0].bytes_sent == Fraction(3, 2) and "1.5" in odd.table()


def test_one_collective_of_several_tensors():
    call = only(
        "%x = f32[] constant(0)",
        "%s = pred[5]{0} constant(0)",
        "%c = (f32[8,64]{1,0}, f32[], /*index=2*/pred[5]{0}) all-reduce(%p, %x, /*index=2*/%s),"
        " replica_groups=[4,2]<=[8]",
    )
    assert call.shapes == ("f32[8,64]", "f32[]", "pred[5]") and call.elements == 512 + 1 + 5
    assert call.bytes_sent == 4 * 513 + 5


def test_an_asynchronous_pair_is_one_collective():
    attributes = "replica_groups=[2,4]<=[8], dimensions={0}"
    led = hlo_ledger(
        program(
            f"%g = (f32[8,64]{{1,0}}, f32[32,64]{{1,0:T(8,128)}}) all-gather-start(%p), {attributes}",
            "%gd = f32[32,64]{1,0:T(8,128)} all-gather-done(%g)",
            f"%r = ((f32[32,64]{{1,0}}), f32[8,64]{{1,0}}, u32[]) reduce-scatter-start(%gd), {attributes}",
            "%rd = f32[8,64]{1,0} reduce-scatter-done(%r)",
            "%s = (f32[8,64]{1,0}, f32[8,64]{1,0}, u32[], u32[]) collective-permute-start(%rd),"
            " source_target_pairs={{0,1},{1,2}}",
            "ROOT %sd = f32[8,64]{1,0} collective-permute-done(%s)",
        )
    )
    assert [(c.name, c.elements, c.bytes_sent) for c in led.calls] == [
        ("all_gather", 512, 3 * 2048),
        ("reduce_scatter", 2048, 3 * 2048),
        ("collective_permute", 512, 2048),
    ]
    assert led.calls[2].groups == ((0, 1), (1, 2)), "messages from one device to another"


@pytest.mark.parametrize(
    "words, groups",
    [
        ("{{0,1,2,3},{4,5,6,7}}", ROWS),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ROWS),
        ("[4,2]<=[2,4]T(1,0)", PAIRS),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ROWS),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", PAIRS),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", PAIRS),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=8] {'a':(1)2}", PAIRS),
        ("mesh['a'=8] {'a':(2)4}", ROWS),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_who_talks_to_whom(words, groups):
    assert (
        groups_of(f", channel_id=1, replica_groups={words}, dimensions={{0}}, use_global_device_ids=true", 8) == groups
    )


def test_what_is_in_a_loop_is_counted_once_and_told():
    text = HEAD + (
        "%inner (x: f32[4]) -> f32[4] {\n  %x = f32[4]{0} parameter(0)\n"
        "  ROOT %a = f32[4]{0} all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add\n}\n\n"
        "%body (y: f32[4]) -> f32[4] {\n  %y = f32[4]{0} parameter(0)\n"
        "  ROOT %c = f32[4]{0} call(%y), to_apply=%inner\n}\n\n"
        "ENTRY %main (p: f32[4]) -> f32[4] {\n  %p = f32[4]{0} parameter(0)\n"
        "  %b = f32[4]{0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add\n"
        "  ROOT %w = f32[4]{0} while(%b), condition=%test, body=%body, backend_config={}\n}\n"
    )
    led = hlo_ledger(text)
    assert [call.in_loop for call in led.calls] == [True, False]
    assert led.table().splitlines()[1:] == [
        "all_reduce      2         8          48",
        "1 of the calls in a loop, counted once, however often it turns",
    ]


def test_what_it_cannot_read_is_an_error():
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        hlo_ledger("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}")
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        hlo_ledger(program("%r = f32[8,64]{1,0} ragged-all-to-all(%p, %p), replica_groups={}"))
    with pytest.raises(ValueError, match="which devices talk"):
        hlo_ledger(program("%r = f32[8,64]{1,0} all-reduce(%p), replica_groups=something_new"))


def test_forms_side_by_side():
    by_hand = Ledger([Call("all_gather_single", (0, 1), "float32", 8, 32), Call("all_gather", (0, 1), "float32", 2, 8)])
    compiled = hlo_ledger(program("%a = f32[8,64]{1,0} all-reduce(%p), replica_groups={}"))
    forms = {"by hand": by_hand, "CommDebugMode": {"c10d_functional.all_reduce": 5}, "JAX": compiled, "none": Ledger()}
    assert side_by_side(forms).splitlines() == [
        "form           operation   calls  elements  bytes sent",
        "by hand        all_gather      2        10          40",
        "CommDebugMode  all_reduce      5                      ",
        "JAX            all_reduce      1       512       3,584",
        "none           nothing         0         0           0",
    ]
    names = ("c10d.allreduce_", "c10d._allgather_base_", "_c10d_functional.reduce_scatter_tensor", "alltoall_base_")
    assert [kind_of(name) for name in names] == ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    assert kind_of("send") == "send"


COMPILED = """
import json
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from lecture_lib.trace import hlo_ledger

assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
x = jnp.ones((16, 64))
read = {}

def compiled(name, f, *arguments, **options):
    led = hlo_ledger(jax.jit(f, **options).lower(*arguments).compile().as_text())
    read[name] = [(c.name, c.groups, c.elements, int(c.bytes_sent), c.in_loop) for c in led.calls]

def one_of_each(x):  # (4, 64) on each device
    summed = jax.lax.psum(x, "tp")
    gathered = jax.lax.all_gather(x, "dp", tiled=True)
    scattered = jax.lax.psum_scatter(jnp.sin(x), "tp", scatter_dimension=0, tiled=True)
    turned = jax.lax.all_to_all(x, "tp", 1, 0, tiled=True)
    sent = jax.lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)])
    looped = jax.lax.scan(lambda c, _: (jax.lax.psum(c, "dp") / 2, None), jnp.cos(x), None, length=3)[0]
    return summed, gathered, scattered, turned, sent, looped

compiled("by hand", jax.shard_map(one_of_each, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False), x)

put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
a, b = put(jnp.ones((64, 256)), None, "tp"), put(jnp.ones((256, 64)), "tp")
loss = lambda w, x: (jax.nn.gelu(x @ w[0]) @ w[1]).sum()
compiled("auto", jax.grad(loss), (a, b), put(x, "dp"))
compiled("whole", lambda x: x + 1, put(x, "dp", "tp"), out_shardings=NamedSharding(mesh, P(None, "tp")))
print(json.dumps(read))
"""


@pytest.mark.timeout(300)  # most of it is importing: seconds, or minutes where other tests run at once
def test_what_jax_compiles():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    read = {
        name: [(kind, tuple(tuple(group) for group in groups), *rest) for kind, groups, *rest in calls]
        for name, calls in json.loads(done.stdout).items()
    }
    rings = tuple((i + 4 * d, (i + 1) % 4 + 4 * d) for d in range(2) for i in range(4))
    size, each = 4 * 64, 4 * 64 * 4  # elements and bytes that a device brings
    assert sorted(read["by hand"]) == [
        ("all_gather", PAIRS, size, each, False),
        ("all_reduce", ROWS, size, 2 * 3 * each // 4, False),
        ("all_reduce", PAIRS, size, each, True),
        ("all_to_all", ROWS, size, 3 * each // 4, False),
        ("collective_permute", rings, size, each, False),
        ("reduce_scatter", ROWS, size, 3 * each // 4, False),
    ]
    assert read["whole"] == [("all_gather", PAIRS, 8 * 16, 8 * 16 * 4, False)]
    # Tensor parallelism needs no all-reduce for these gradients; data parallelism one, of both of a device's shards.
    assert ("all_reduce", PAIRS, 2 * 64 * 64, 2 * 64 * 64 * 4, False) in read["auto"]
