"""Diffusers pipeline classes without a recipe, with the reason for each."""

COMPILES_MASK = "compiles the mask of its flex attention, which takes many seconds in a new process"
NEEDS_GUARDRAIL = "its license and code require the safety checker of cosmos_guardrail, which is not installed"
NEEDS_INVERSION = "an image must be inverted in a separate call before the pipeline is called"
NEEDS_QWEN_PROCESSOR = "the processor of Qwen 2.5 VL requires torchvision, which is not installed"
NEEDS_SENTENCEPIECE = "requires sentencepiece, which is not installed"
NEEDS_TORCHVISION = "requires torchvision, which is not installed"

__all__ = ["NOT_COVERED"]

NOT_COVERED: dict[str, str] = {
    "AnyFlowFARPipeline": "uses flex attention, which takes seconds per call if it is not compiled",
    "Cosmos2TextToImagePipeline": NEEDS_GUARDRAIL,
    "Cosmos2VideoToWorldPipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_PredictBasePipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_TransferPipeline": NEEDS_GUARDRAIL,
    "CosmosTextToWorldPipeline": NEEDS_GUARDRAIL,
    "CosmosVideoToWorldPipeline": NEEDS_GUARDRAIL,
    "EasyAnimateControlPipeline": "diffusers 0.42 passes encode_prompt an argument that it does not accept",
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
