"""Diffusers pipeline classes without a recipe, with the reason for each."""

COMPILES_MASK = "compiles the mask of its flex attention, which takes many seconds in a new process"
NEEDS_HEAD_MASK = "its query transformer (modeling_blip2.py) calls get_head_mask, which transformers 5 no longer has"
NEEDS_ONNX = "runs models in ONNX Runtime, which is not installed, and not in torch"
NEEDS_SENTENCEPIECE = "requires sentencepiece, which is not installed"

__all__ = ["NOT_COVERED"]

NOT_COVERED: dict[str, str] = {
    "AudioDiffusionPipeline": "requires librosa, which is not installed",
    "BlipDiffusionControlNetPipeline": NEEDS_HEAD_MASK,
    "ConsisIDPipeline": "requires OpenCV, which is not installed",
    "Cosmos2_5_TransferPipeline": "its ControlNet resizes a mask with torchvision, which is not installed",
    "EasyAnimateControlPipeline": "diffusers 0.42 passes encode_prompt text_encoder_index, which it does not accept",
    "KolorsImg2ImgPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPAGPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPipeline": NEEDS_SENTENCEPIECE,
    "OmniGenPipeline": "its constructor requires torchvision, which is not installed",
    **dict.fromkeys(
        (
            "OnnxStableDiffusionImg2ImgPipeline",
            "OnnxStableDiffusionInpaintPipeline",
            "OnnxStableDiffusionPipeline",
            "OnnxStableDiffusionUpscalePipeline",
            "StableDiffusionOnnxPipeline",
        ),
        NEEDS_ONNX,
    ),
    "SpectrogramDiffusionPipeline": "requires note_seq, which is not installed",
    "WanAnimate2DistilledModularPipeline": COMPILES_MASK,
    "WanAnimate2ModularPipeline": COMPILES_MASK,
}
