"""Diffusers pipeline classes without a recipe, with the reason for each."""

COMPILES_MASK = "compiles the mask of its flex attention, which takes many seconds in a new process"
NEEDS_INVERSION = "an image must be inverted in a separate call before the pipeline is called"
NEEDS_QWEN_PROCESSOR = "the processor of Qwen 2.5 VL requires torchvision, which is not installed"
NEEDS_SENTENCEPIECE = "requires sentencepiece, which is not installed"
NEEDS_TORCHVISION = "requires torchvision, which is not installed"

__all__ = ["NOT_COVERED"]

NOT_COVERED: dict[str, str] = {
    "Cosmos2_5_TransferPipeline": "its ControlNet resizes a mask with torchvision, which is not installed",
    "EasyAnimateControlPipeline": "diffusers 0.42 passes encode_prompt text_encoder_index, which it does not accept",
    "Kandinsky5I2IPipeline": NEEDS_QWEN_PROCESSOR,
    "KolorsImg2ImgPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPAGPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPipeline": NEEDS_SENTENCEPIECE,
    "LEditsPPPipelineStableDiffusion": NEEDS_INVERSION,
    "LEditsPPPipelineStableDiffusionXL": NEEDS_INVERSION,
    "MusicLDMPipeline": "expects the text features of CLAP as a tensor, which transformers 5 no longer returns",
    "OmniGenPipeline": NEEDS_TORCHVISION,
    "QwenImageEditInpaintPipeline": NEEDS_QWEN_PROCESSOR,
    "QwenImageEditPipeline": NEEDS_QWEN_PROCESSOR,
    "QwenImageEditPlusPipeline": NEEDS_QWEN_PROCESSOR,
    "WanAnimate2DistilledModularPipeline": COMPILES_MASK,
    "WanAnimate2ModularPipeline": COMPILES_MASK,
}
