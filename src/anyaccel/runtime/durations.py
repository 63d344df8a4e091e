"""Frame counts, frame rates and durations: one option for the different call arguments of the pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from anyaccel.call_limits import check_frames
from anyaccel.errors import UsageError

__all__ = [
    "DURATION_OPTIONS",
    "assign_durations",
    "check_duration",
    "choose_frame_rate",
    "find_frame_parameter",
    "round_frames",
]

# Call arguments of diffusers pipelines (0.42), by the option that sets them.
_FRAMES = ("num_frames", "video_length", "frames")
_RATES = ("frame_rate", "fps", "target_fps")
_DURATIONS = ("audio_end_in_s", "audio_length_in_s", "audio_duration_s", "audio_duration", "duration", "max_duration")
DURATION_OPTIONS = {"frames": "--frames", "fps": "--fps", "seconds": "--seconds"}
# Attributes with the number of frames per latent frame.
_TIME_SCALES = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_DEFAULT_RATE = 16.0

# Frames per second of the videos on which a model was trained, by the start of the pipeline's name: the rate with which
# the documentation of diffusers 0.42 writes them. The longest start that matches counts.
_FAMILY_RATES: Mapping[str, float] = {
    "Allegro": 15, "AnimateDiff": 8, "AnyFlow": 16, "ChronoEdit": 16, "CogVideoX": 8, "ConsisID": 8, "Cosmos2_5": 16,
    "Cosmos2_5_Transfer": 30, "EasyAnimate": 8, "Helios": 24, "HunyuanSkyreels": 15, "HunyuanVideo": 15,
    "HunyuanVideo15": 24, "HunyuanVideoFramepack": 30, "Kandinsky5": 24, "Kandinsky6": 24, "LTX": 24, "LucyEdit": 24,
    "Mochi": 30, "MotifVideo": 24, "SanaVideo": 16, "SanaImageToVideo": 16, "SkyReelsV2": 24, "Wan": 16,
    "WanAnimate": 30,
}  # fmt: skip


def check_duration(name: str, value: Any) -> Any:
    """Return a frame count, a frame rate or a number of seconds; raise UsageError if it is out of range."""
    if name == "frames":
        return check_frames(value, hint="for example --frames 16 (frames=16)")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        subject = "the frame rate" if name == "fps" else "the duration"
        unit = "frames per second" if name == "fps" else "seconds"
        raise UsageError(
            f"{subject} must be a positive number of {unit}, not {value!r:.60}",
            hint=f"for example {DURATION_OPTIONS[name]} {24 if name == 'fps' else 5}",
        )
    return value


def find_frame_parameter(parameters: Collection[str]) -> str | None:
    """Return the call argument with the number of frames, or None if the pipeline has none."""
    return next((name for name in _FRAMES if name in parameters), None)


def assign_durations(
    pipeline: str, parameters: Mapping[str, inspect.Parameter], call: Mapping[str, Any], pipe: Any
) -> dict[str, Any]:
    """Return the call with `frames`, `fps` and `seconds` as arguments of the pipeline.

    `seconds` is the duration of audio, or the frame count divided by the frame rate. The frame count is rounded to one
    that the pipeline generates; before loading, `pipe` is None, and it is not.
    """
    arguments = {name: value for name, value in call.items() if name not in DURATION_OPTIONS}
    frames, rate = find_frame_parameter(parameters), next((name for name in _RATES if name in parameters), None)
    duration = next((name for name in _DURATIONS if name in parameters), None)
    if call.get("frames") is not None:
        if frames is None:
            raise UsageError(
                f"{pipeline} has no argument for the number of frames",
                hint="omit --frames" + ("; set the length with --seconds" if duration else ""),
            )
        arguments[frames] = call["frames"]
    # Other models do not depend on the rate; there it is only that of the file.
    if call.get("fps") is not None and rate is not None:
        arguments[rate] = call["fps"]
    seconds = call.get("seconds")
    if seconds is None:
        return arguments
    if frames is not None:
        if call.get("frames") is not None:
            raise UsageError("--seconds and --frames cannot be combined", hint="pass one of them")
        fps, _ = choose_frame_rate(pipeline, parameters, call)
        arguments[frames] = round_frames(pipe, max(1, round(seconds * fps)), parameters[frames].default)
    elif duration is not None:
        arguments[duration] = float(seconds)
    else:
        raise UsageError(f"{pipeline} has no argument for the duration", hint="omit --seconds")
    return arguments


def choose_frame_rate(pipeline: str, parameters: Any, call: Mapping[str, Any]) -> tuple[float, str]:
    """Return the frame rate of a video, and a note if it is only a guess.

    It is that of the call, the default of the pipeline, or that of the model family.
    """
    passed = next((call[name] for name in ("fps", *_RATES) if isinstance(call.get(name), int | float)), None)
    if passed is not None:
        return float(passed), ""
    defaults = (parameters[name].default for name in _RATES if name in parameters)
    default = next((value for value in defaults if isinstance(value, int | float)), None)
    if default is not None:
        return float(default), ""
    families = [name for name in _FAMILY_RATES if pipeline.startswith(name)]
    if families:
        return float(_FAMILY_RATES[max(families, key=len)]), ""
    return (
        _DEFAULT_RATE,
        f"the frame rate of {pipeline} is not known; the file has {_DEFAULT_RATE:g}: set it with --fps",
    )


def round_frames(pipe: Any, frames: int, default: Any) -> int:
    """Return the frame count closest to `frames` that the pipeline generates.

    A video model compresses several frames into one latent frame, most of them all frames but the first.
    """
    scales = (getattr(pipe, name, None) for name in _TIME_SCALES)
    scale = next((value for value in scales if isinstance(value, int) and value > 1), 1)
    # The default count shows whether the first frame is compressed: 81 = 20 * 4 + 1, but 88 = 22 * 4.
    rest = default % scale if isinstance(default, int) else 1 % scale
    return max(1, round((frames - rest) / scale)) * scale + rest if frames > rest else max(1, rest)
