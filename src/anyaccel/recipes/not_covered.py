"""The pipeline classes of diffusers that were tried, and cannot have a recipe here."""

NEEDS_GUARDRAIL = "its licence and its code ask for the safety checker of cosmos_guardrail, which is not installed"
NEEDS_INVERSION = "a picture must be inverted by a call of its own before the pipeline is called"
NEEDS_QWEN_PROCESSOR = "needs torchvision, which is not installed, for the processor of Qwen 2.5 VL"
NEEDS_SENTENCEPIECE = "needs sentencepiece, which is not installed"
NEEDS_TORCHVISION = "needs torchvision, which is not installed"

__all__ = ["NOT_COVERED"]

NOT_COVERED: dict[str, str] = {
    "AnyFlowFARPipeline": "attends with flex attention, which takes seconds a call where it is not compiled",
    "Cosmos2TextToImagePipeline": NEEDS_GUARDRAIL,
    "Cosmos2VideoToWorldPipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_PredictBasePipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_TransferPipeline": NEEDS_GUARDRAIL,
    "CosmosTextToWorldPipeline": NEEDS_GUARDRAIL,
    "CosmosVideoToWorldPipeline": NEEDS_GUARDRAIL,
    "EasyAnimateControlPipeline": "diffusers 0.42 passes its own encode_prompt an argument that it does not take",
    "Kandinsky5I2IPipeline": NEEDS_QWEN_PROCESSOR,
    "KolorsImg2ImgPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPAGPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPipeline": NEEDS_SENTENCEPIECE,
    "LEditsPPPipelineStableDiffusion": NEEDS_INVERSION,
    "LEditsPPPipelineStableDiffusionXL": NEEDS_INVERSION,
    "MusicLDMPipeline": "takes the text features of CLAP as a tensor, which transformers 5 no longer gives",
    "OmniGenPipeline": NEEDS_TORCHVISION,
    "QwenImageEditInpaintPipeline": NEEDS_QWEN_PROCESSOR,
    "QwenImageEditPipeline": NEEDS_QWEN_PROCESSOR,
    "QwenImageEditPlusPipeline": NEEDS_QWEN_PROCESSOR,
}
