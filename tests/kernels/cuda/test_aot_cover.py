"""Which launches are compiled where there is no time for all: few, which together have what all have."""

from benchmarks.checks.aot_cover import cover, kind
from quengine.kernels.cuda.weights.layout import ScaleKind
from tests.fork_server import without_interpreter


def test_what_is_chosen_has_every_feature_and_none_is_needless() -> None:
    features = [{("a",), ("b",)}, {("b",), ("c",)}, {("c",), ("d",)}, {("a",)}, {("e",)}]
    assert cover(features, [1.0] * 5) == [0, 2, 4]
    assert cover([], []) == []
    # The first is chosen first, for its three; the others, which have what no other has, make it needless.
    late = [{("a",), ("b",), ("c",)}, {("a",), ("b",), ("x",)}, {("c",), ("y",), ("z",)}]
    assert cover(late, [1.0] * 3) == [1, 2]


def test_of_launches_that_add_as_much_the_smallest_is_chosen_and_then_the_first() -> None:
    alike = [{("a",)}, {("a",)}, {("a",)}]
    assert cover(alike, [2.0, 1.0, 1.0]) == [1]
    assert cover(alike, [1.0, 1.0, 1.0]) == [0]


def test_amounts_count_by_their_kind_and_choices_each() -> None:
    assert [kind(value) for value in (None, True, 3, -1, 8, 64, 256)] == [None, True, 3, -1, 8, 64, 256]
    assert kind(512) == kind(4096) != kind(256)
    assert kind(2880) == kind(48) != kind(704 + 1) == kind(9)
    assert kind(11.3) == kind(32.0) != kind(1.0)
    assert kind(ScaleKind.NIBBLE) is ScaleKind.NIBBLE, "no amount, though it is a number above the choices"


COVERED = """
from benchmarks.checks import aot, aot_cover
work = aot.variants([80, 89, 90], "Q8_0, every matrix") + aot.variants([80, 90], "Q6_K, every matrix")
few = aot.covering(work)
assert [id(v) for v in few] == [id(v) for v in aot.covering(work)]
assert len(few) < len(work)
every, some = (set().union(*map(aot_cover.features_of, of)) for of in (work, few))
assert some == every
for v in work:
    kernel = v.launch.kernel
    for arch in v.archs if v.decode else ():
        alike = [x for x in few if x.launch.kernel is kernel and arch in x.archs and x.decode]
        assert aot_cover.size_of(v.launch) <= max(aot_cover.size_of(x.launch) for x in alike), v.launch.name
launch = next(v.launch for v in work if v.launch.name == "matvec_kernel")
values = dict(aot_cover.constants(launch))
print(values["A.layout.format"], values["A.layout.low"], values["B"], aot_cover.size_of(launch) > 0)
"""


def test_each_kernel_is_compiled_with_each_constant_and_for_decode_with_the_largest() -> None:
    assert without_interpreter(COVERED).split() == ["Q8_0", "8", "None", "True"]
