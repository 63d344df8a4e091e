"""Diffusers pipeline classes without a recipe, with the reason for each."""

NEEDS_GUARDRAIL = "its license and code require the safety checker of cosmos_guardrail, which is not installed"
NEEDS_HEAD_MASK = "its query transformer (modeling_blip2.py) calls get_head_mask, which transformers 5 no longer has"
NEEDS_SENTENCEPIECE = "requires sentencepiece, which is not installed"
NEEDS_TORCHVISION = "its constructor requires torchvision, which is not installed"

__all__ = ["NOT_COVERED"]

NOT_COVERED: dict[str, str] = {
    "AnyFlowFARPipeline": "uses flex attention, which takes seconds per call if it is not compiled",
    "BlipDiffusionControlNetPipeline": NEEDS_HEAD_MASK,
    "BlipDiffusionPipeline": NEEDS_HEAD_MASK,
    "Cosmos2TextToImagePipeline": NEEDS_GUARDRAIL,
    "Cosmos2VideoToWorldPipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_PredictBasePipeline": NEEDS_GUARDRAIL,
    "Cosmos2_5_TransferPipeline": NEEDS_GUARDRAIL,
    "CosmosTextToWorldPipeline": NEEDS_GUARDRAIL,
    "CosmosVideoToWorldPipeline": NEEDS_GUARDRAIL,
    "EasyAnimateControlPipeline": "diffusers 0.42 passes encode_prompt an argument that it does not accept",
    "KolorsImg2ImgPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPAGPipeline": NEEDS_SENTENCEPIECE,
    "KolorsPipeline": NEEDS_SENTENCEPIECE,
    "OmniGenPipeline": NEEDS_TORCHVISION,
}
