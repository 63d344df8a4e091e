"""Faults that an outside review found in November 2026, and the tests that cover them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault with the tests and usages that fail if it comes back."""

    summary: str
    tests: tuple[str, ...] = ()
    """Test functions: `path::function`, relative to `tests`."""
    usages: tuple[str, ...] = ()
    """Usages of the differential suite."""
    untested: str = ""
    """What no test covers, and why."""


_CAPTURE = "runtime/speed/test_graph_capture.py::"
_INPUTS = "runtime/workarounds/test_model_inputs.py::"

FAULTS = (
    Fault(
        summary="Tests failed on a machine without Chromium.",
        tests=("test_tools.py::test_a_test_without_its_tool_is_skipped",),
    ),
    Fault(
        summary="The demo installed the dependencies of tests, docs and checks.",
        tests=("test_tools.py::test_the_demo_installs_only_the_package",),
    ),
    Fault(
        summary="On CUDA, models with 3-D convolutions could not be compiled.",
        tests=("runtime/speed/test_compiled_forward.py::test_channels_last_applies_to_2d_convolutions",),
        untested="Errors of the compiler itself; benchmarks/results/compiled_recipes_cuda.json lists the recipes.",
    ),
    Fault(
        summary="Full-size Wan 2.1 failed when compiled.",
        tests=("runtime/speed/test_compiled_forward.py::test_channels_last_applies_to_2d_convolutions",),
        untested="The full-size model needs a GPU.",
    ),
    Fault(
        summary="Speed of full-size Z-Image and Stable Diffusion 3.5 (a measurement, not a fault).",
        untested="A benchmark measures it (benchmarks/speed.py).",
    ),
    Fault(
        summary="A user's function or dispatch mode had no effect on replayed calls, or stayed in effect.",
        tests=(_CAPTURE + "test_calls_under_torch_modes_are_not_captured",),
        usages=("function_mode_around_one_call", "dispatch_mode_counts_operations"),
    ),
    Fault(
        summary="Placing replaced the memory of weights: training, `state_dict()` and `share_memory()` broke.",
        usages=(
            "training_after_inference_mode", "state_dict_edited", "shared_memory", "parameters_flattened",
            "model_saved_by_torch",
        ),
    ),
    Fault(
        summary="Edits of `.data` were noticed only at the start of a placed call.",
        usages=(
            "weight_data_multiplied", "weight_data_replaced", "ema_swapped", "callback_edits_weights",
            "model_called_after_an_edit", "shared_components_edited",
        ),
    ),
    Fault(
        summary="With one generator, a split batch of images had other noise.",
        tests=("runtime/placement/test_row_split.py::test_generators_and_results_are_those_of_one_call",),
        usages=(
            "two_images_stable_diffusion_image_to_image", "two_images_stable_diffusion_inpaint", "two_images_amused",
            "two_images_flux_image_to_image", "global_generator_two_images",
        ),
    ),
    Fault(
        summary="The prompt cache returned stale embeddings.",
        usages=(
            "encode_prompt_patched", "tokenizer_changed", "tokenizer_patched", "buffer_edited",
            "text_encoder_weight_edited", "text_encoder_config_changed",
        ),
    ),
    Fault(
        summary="Patches of classes after placing had no effect.",
        tests=(
            _INPUTS + "test_later_patches_of_a_pipeline_class_are_used",
            _INPUTS + "test_later_patches_of_a_model_class_are_used",
            _CAPTURE + "test_custom_code_is_found_despite_wraps",
        ),
        usages=("method_patched_on_class", "call_patched_on_class", "model_class_patched", "processor_class_patched"),
    ),
    Fault(
        summary="Blocks overwrote tensors that a replaced module owns.",
        usages=("module_returns_its_own_tensor",),
    ),
    Fault(
        summary="Pipelines made from placed ones by diffusers were not placed, and ignored `seed=`.",
        tests=("runtime/test_pipeline.py::test_from_pipe_keeps_device_dtype_and_components",),
        usages=(
            "from_pipe_after_placing", "class_from_pipe_after_placing", "components_constructor_after_placing",
        ),
    ),
    Fault(
        summary="The number in `virtual:neuron:3` was read as a count.",
        tests=("runtime/placement/test_place.py::test_a_number_after_a_virtual_device_is_an_index",),
    ),
    Fault(
        summary="Keys of compiled graphs left out constants of the code and the version of anyaccel.",
        tests=("runtime/speed/test_compile_cache.py::test_entries_are_found_only_by_their_key",),
        untested="That every part of the code is in the key.",
    ),
    Fault(
        summary="A copied pipeline called the original's forward.",
        tests=(_INPUTS + "test_copies_run_their_own_weights",),
        usages=("deepcopy_of_a_pipeline", "deepcopy_of_a_model"),
    ),
    Fault(
        summary="Calls that work in diffusers failed: signatures, sizes, tracing, export, vmap, inference mode.",
        tests=(
            "runtime/test_pipeline.py::test_a_subclass_with_any_signature_gets_positional_arguments",
            _INPUTS + "test_models_can_be_traced_exported_and_compiled",
            _INPUTS + "test_models_work_under_vmap",
        ),
        usages=(
            "subclass_with_any_signature", "subclass_with_own_arguments", "numpy_integer_sizes",
            "flux_size_that_is_rounded", "built_under_inference_mode",
        ),
    ),
    Fault(
        summary="`anyaccel explain` failed for a tiny Wan, was slow and assumed another size.",
        tests=(
            "explanation/test_sizes.py::test_a_video_has_the_default_size_of_its_pipeline_even_without_the_text_encoder",
            "explanation/test_sizes.py::test_a_tiny_video_pipeline_has_the_largest_size_that_its_config_supports",
        ),
        untested="How long it takes.",
    ),
    Fault(
        summary="Some of diffusers' own test pipelines failed on virtual devices.",
        tests=("emulator/test_pipelines.py::test_pipelines_validated_on_neuron_have_no_errors",),
        untested="AnyFlow, Motif-Video, Lumina-Next, SDE schedulers; benchmarks/results/chart.json lists all recipes.",
    ),
    Fault(
        summary="A misspelt argument was ignored.",
        tests=("runtime/call/test_bad_input.py::test_an_unknown_argument_raises_type_error",),
        usages=("unknown_argument",),
    ),
    Fault(
        summary="`anyaccel check` gave the scheduler's hint for any host read, and pointed into site-packages.",
        tests=(
            "checking/test_ci_formats.py::test_github_shows_each_line_once",
            "checking/test_check.py::test_round_trips_in_a_model_are_counted_per_step",
        ),
    ),
    Fault(
        summary="Unknown devices had no useful suggestion.",
        tests=(
            "backends/test_device_spec.py::test_invalid_strings", "backends/test_device_spec.py::test_valid_strings",
        ),
    ),
    Fault(
        summary="The docs claimed to cover every pipeline.",
        tests=("recipes/test_recipes.py::test_every_pipeline_class_of_diffusers_has_a_recipe_or_a_reason",),
    ),
    Fault(
        summary="Sentences in the docs were out of date.",
        tests=("docs/test_sample_output.py::test_blocks_run_and_show_their_real_output",),
        untested="Prose; only code and its output are checked.",
    ),
    Fault(
        summary="Commands printed nothing for minutes, and warnings of libraries.",
        tests=("test_library_logging.py::test_commands_show_only_warnings_for_users",),
        untested="Progress on an output that is not a terminal.",
    ),
    Fault(
        summary="A full disk was noticed only after the image was computed.",
        tests=(
            "generation/test_generate.py::test_read_only_folder_is_detected_by_writing",
            "generation/test_generate.py::test_full_disk_leaves_no_file",
        ),
    ),
    Fault(
        summary="diffusers' own tests of offloading, training and IP-Adapter failed on virtual devices.",
        tests=(
            "emulator/test_pipelines.py::test_diffusers_device_map_and_offloading",
            "emulator/test_gradients.py::test_models_of_placed_pipelines",
            "emulator/test_gradients.py::test_gradients_and_optimizer_step",
        ),
        usages=("group_offloading_by_the_user", "training_step_between_calls", "ema_swapped", "ip_adapter_scale"),
    ),
)  # fmt: skip
"""In the order of the review, from 1 to 27."""
