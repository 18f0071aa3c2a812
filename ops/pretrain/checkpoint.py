"""The model's geometry, and the files of a checkpoint folder.

The folder is an ordinary Hugging Face checkpoint (`AutoModelForImageTextToText`, `AutoTokenizer`, `AutoImageProcessor`)
with one file of ours beside it, `nexus.json`, which says how a prompt for it is laid out.
"""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ops.pretrain.tokenizer import save_tokenizer
from ops.pretrain.vocabulary import QUERY_TOKEN, QUERY_TOKENS

IMAGE_SIZE = 96
PATCH, MERGE = 16, 2
IMAGE_TOKENS = (IMAGE_SIZE // PATCH // MERGE) ** 2


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Return the nano geometry: 4 text layers of 128, a vision tower of 4 layers of 96, no deepstack."""
    token = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            # Sections are (time, height, width) of head_dim / 2 frequencies.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
            "pad_token_id": token("<|endoftext|>"),
            "bos_token_id": None,
            "eos_token_id": token("<|im_end|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 96,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": (IMAGE_SIZE // PATCH) ** 2,
            "deepstack_visual_indexes": [],
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def build_model(config: Qwen3VLConfig, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return a freshly initialised model in float32.

    The usual deviation of 0.02 suits layers a thousand wide; here it leaves the picture so faint that a thousand steps pass
    before the loss notices it. So matrices start at 1/sqrt(inputs), and places in the picture as loud as its content.
    """
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "pos_embed" in name:
                weight.normal_(0, 0.3)
            elif "embed_tokens" in name:
                weight.normal_(0, 0.06)
            elif weight.ndim > 1:
                quiet = (8 if "language_model" in name else 1) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                weight.normal_(0, (weight[0].numel() * quiet) ** -0.5)
    return model


def build_image_processor() -> Qwen2VLImageProcessorPil:
    """Return the processor: whatever the input size, a square picture becomes 96 x 96, so 9 image tokens."""
    pixels = IMAGE_SIZE * IMAGE_SIZE
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": pixels, "longest_edge": pixels},
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def save_checkpoint(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path, steps: int
) -> None:
    """Write a whole checkpoint, each file by rename, so a reader never meets half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".nano-") as scratch:
        part = Path(scratch)
        model.save_pretrained(str(part))
        save_tokenizer(tokenizer, part)
        build_image_processor().save_pretrained(str(part))
        card = {
            "name": "nexus-nano",
            "image_size": IMAGE_SIZE,
            "image_tokens": IMAGE_TOKENS,
            "query_token": QUERY_TOKEN,
            "query_tokens": QUERY_TOKENS,
            "prompt": "{instruction}",
            "layout": "chat template: user turn (images, then the instruction), assistant turn opened, query tokens last",
            "pretraining_steps": steps,
        }
        (part / "nexus.json").write_text(json.dumps(card, indent=2) + "\n")
        for file in sorted(part.iterdir()):
            staged = folder / f".{file.name}.part"
            shutil.copyfile(file, staged)
            staged.replace(folder / file.name)
