"""Choice of the dtype, and replacements for dtypes that a device lacks."""

from __future__ import annotations

from anyaccel.backends.sheet import Sheet
from anyaccel.planning import ComponentFacts, PipelineFacts, PlacementOptions
from anyaccel.planning.decision import Decision
from anyaccel.planning.dtype import choose_component_dtypes, choose_dtype, choose_replacements
from tests.planning.sheets import dtype_limit, operation_limit, real_sheet, without_limits


def facts(*dtypes: str, encoder: str = "", quantized: bool = False) -> PipelineFacts:
    """Return a pipeline with one denoiser per dtype."""
    components = [
        ComponentFacts(name=f"unet{index}", kind="UNet", dtype=dtype, parameters=1, denoises=True, quantized=quantized)
        for index, dtype in enumerate(dtypes)
    ]
    if encoder:
        components.append(
            ComponentFacts(name="text_encoder", kind="Text", dtype=encoder, parameters=1, has_own_dtype=True)
        )
    return PipelineFacts(pipeline="Test", components=tuple(components))


NO_BF16 = without_limits(bfloat16=dtype_limit("error", becomes="float16", says="No bfloat16 here."))


def test_requested_dtype_wins_unless_the_device_lacks_it() -> None:
    requested = choose_dtype(without_limits(), facts("float16"), PlacementOptions(dtype="float32"))
    assert requested.value == "float32"
    assert "requested" in requested.reason
    replacement = choose_dtype(NO_BF16, facts(), PlacementOptions(dtype="bfloat16"))
    assert replacement.value == "float16"
    assert "bfloat16 was requested" in replacement.reason
    assert "No bfloat16 here" in replacement.reason


def test_loaded_half_precision_is_kept() -> None:
    assert choose_dtype(without_limits(), facts("float16"), PlacementOptions()).value == "float16"
    assert choose_dtype(NO_BF16, facts("bfloat16"), PlacementOptions()).value == "float16"
    assert choose_dtype(without_limits(), facts("float16", encoder="float32"), PlacementOptions()).value == "float16"
    assert choose_dtype(without_limits(), facts("float32", encoder="float16"), PlacementOptions()).value == "bfloat16"
    assert choose_dtype(without_limits(), facts("float16", "bfloat16"), PlacementOptions()).value == "float16"


def test_loaded_float64_is_kept() -> None:
    assert choose_dtype(without_limits(), facts("float64"), PlacementOptions()).value == "float64"
    assert choose_dtype(real_sheet("cpu"), facts("float64"), PlacementOptions()).value == "float64"
    assert choose_dtype(real_sheet("mps"), facts("float64"), PlacementOptions()).value == "float32"


def test_loaded_float32_becomes_the_best_dtype_of_the_device() -> None:
    assert choose_dtype(without_limits(), facts("float32"), PlacementOptions()).value == "bfloat16"
    assert choose_dtype(NO_BF16, facts("float32"), PlacementOptions()).value == "float16"
    both = without_limits(bfloat16=dtype_limit("error"), float16=dtype_limit("wrong"))
    assert choose_dtype(both, facts(), PlacementOptions()).value == "float32"
    slow = without_limits(bfloat16=dtype_limit("slow"))
    assert choose_dtype(slow, facts(), PlacementOptions()).value == "bfloat16"
    conditional = without_limits(bfloat16=dtype_limit("error", only_if=("macos<14",)))
    assert choose_dtype(conditional, facts(), PlacementOptions()).value == "bfloat16"


def test_nothing_is_cast_on_the_cpu() -> None:
    cpu = real_sheet("cpu")
    for dtype in ("float16", "bfloat16", "float64", "float32"):
        assert choose_dtype(cpu, facts(dtype), PlacementOptions()).value == dtype
    loaded = facts("float32", encoder="bfloat16")
    assert choose_dtype(cpu, loaded, PlacementOptions()).value == "float32"
    assert component_dtypes(loaded, "float32", sheet=cpu).value == (("text_encoder", "bfloat16"),)
    assert choose_dtype(cpu, loaded, PlacementOptions(dtype="float16")).value == "float16"
    assert choose_dtype(cpu, PipelineFacts(pipeline=""), PlacementOptions()).value == "float32"


def component_dtypes(
    loaded: PipelineFacts, chosen: str, options: PlacementOptions | None = None, sheet: Sheet | None = None
) -> Decision[tuple[tuple[str, str], ...]]:
    return choose_component_dtypes(sheet or without_limits(), loaded, chosen, options or PlacementOptions())


def test_components_that_keep_their_own_dtype() -> None:
    assert component_dtypes(facts("float16"), "float16").value == ()
    quantized = component_dtypes(facts("uint8", quantized=True), "bfloat16")
    assert quantized.value == (("unet0", "uint8"),)
    assert "quantized" in quantized.reason
    wide = facts("float16", encoder="float32")
    assert component_dtypes(wide, "float16").value == (("text_encoder", "float32"),)
    assert component_dtypes(wide, "float16", PlacementOptions(dtype="float16")).value == ()
    assert component_dtypes(facts("float32", encoder="float32"), "float32").value == ()
    assert component_dtypes(facts("float16", "bfloat16"), "float16").value == (("unet1", "bfloat16"),)


def test_a_dtype_per_component_is_kept_on_every_device() -> None:
    loaded, keep = facts("float32", encoder="bfloat16"), PlacementOptions(keep_dtypes=True)
    assert component_dtypes(loaded, "bfloat16").value == (), "transformers chose the dtype of the encoder"
    assert choose_dtype(without_limits(), loaded, keep).value == "float32"
    assert choose_dtype(without_limits(), facts("bfloat16", encoder="float32"), PlacementOptions()).value == "bfloat16"
    assert component_dtypes(loaded, "float32", keep).value == (("text_encoder", "bfloat16"),)
    replaced = component_dtypes(loaded, "float32", keep, NO_BF16)
    assert replaced.value == (("text_encoder", "float16"),)
    assert "text_encoder was loaded in bfloat16, which the device does not support" in replaced.reason


def test_replacements_of_missing_dtypes() -> None:
    assert choose_replacements(without_limits()).value == ()
    sheet = without_limits(
        float64=dtype_limit("error", becomes="float32", says="No float64."),
        int64=dtype_limit("narrowed", becomes="int32", says="Narrow."),
    )
    chosen = choose_replacements(sheet)
    assert chosen.value == (("float64", "float32"), ("int64", "int32"))
    assert chosen.reason == "No float64. Narrow."
    for harmless in (dtype_limit("slow", becomes="float32"), dtype_limit("error", becomes="x", only_if=("torch<2",))):
        assert choose_replacements(without_limits(float64=harmless)).value == ()


def test_complex_dtypes_become_pairs_if_rejected_or_partly_supported() -> None:
    pairs = (("complex64", "pairs"), ("complex128", "pairs"))
    assert choose_replacements(without_limits(complex64=dtype_limit("error"))).value == pairs
    both = without_limits(complex64=dtype_limit("error"), complex128=dtype_limit("error", becomes="complex64"))
    assert choose_replacements(both).value == pairs
    patchy = without_limits(operations=(operation_limit("error", dtypes=("complex64",)),))
    assert choose_replacements(patchy).value == pairs
    slow = without_limits(operations=(operation_limit("slow", dtypes=("complex64",)),))
    assert choose_replacements(slow).value == ()
    wide = without_limits(complex128=dtype_limit("error", becomes="complex64"))
    assert choose_replacements(wide).value == (("complex128", "complex64"),)


def test_a_type_is_replaced_once() -> None:
    both = without_limits(complex64=dtype_limit("error"), operations=(operation_limit("error", dtypes=("complex64",)),))
    names = [name for name, _ in choose_replacements(both).value]
    assert names == ["complex64", "complex128"]


def test_the_sheets() -> None:
    replaced = {name: dict(choose_replacements(real_sheet(name)).value) for name in ("mps", "neuron", "npu", "xpu")}
    assert replaced["mps"] == {"float64": "float32", "int64": "int32", "complex128": "complex64"}
    assert replaced["neuron"]["int64"] == "int32"
    assert replaced["neuron"]["complex64"] == "pairs"
    assert replaced["npu"]["float64"] == "float32"
    assert replaced["xpu"] == {}
    assert dict(choose_replacements(real_sheet("hpu").on(product="gaudi1")).value)["float64"] == "float32"
    assert choose_dtype(
        real_sheet("mps").on(versions={"macos": "13.5"}), facts(), PlacementOptions(dtype="bfloat16")
    ).value == ("bfloat16"), "already resolved for macOS 15"
