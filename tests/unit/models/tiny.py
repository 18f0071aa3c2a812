"""Tiny checkpoints with random weights, one per family, written by the real classes' `save_pretrained`.

A checkpoint from the hub has the same files; what loads one loads the other.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

SENTENCES = [
    "push the red block to the left", "touch the blue block", "open the green drawer and then put it there", "go slowly, stop"
]  # fmt: skip
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def _template(image: str) -> str:
    """A chat template with a mark for each image."""
    return (
        "{%- for message in messages -%}<|start|>{{ message.role }}:"
        "{%- for part in message.content -%}"
        "{%- if part.type == 'image' -%}" + image + "{%- else -%}{{ part.text }}{%- endif -%}"
        "{%- endfor -%}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant:{%- endif -%}"
    )


def _tokenizer(special: Sequence[str], chat: str | None = None, **named: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that knows a few words, its special tokens, and the chat template of one image mark."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    tokens = ["<pad>", "<s>", "</s>", "<|start|>", "<|end|>", *special]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        **dict(zip(("pad_token", "bos_token", "eos_token"), tokens, strict=False)),
        extra_special_tokens=named or tokens,
        padding_side="right",
    )
    made.chat_template = _template(chat) if chat else None
    return made


def _save(path: Path, config: Any, tokenizer: PreTrainedTokenizerFast, images: Any, **processor: Any) -> None:
    """Model, tokenizer and preprocessing side by side; `processor` are arguments of the family's processor."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # much larger than usual, or the layers of so small a model would pass on their input alone
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    images.save_pretrained(path)
    if processor:
        (path / "processor_config.json").write_text(json.dumps(processor))


def _sizes(tokenizer: PreTrainedTokenizerFast, spare: int = 0) -> dict[str, Any]:
    """The text half's vocabulary; `spare` rows for tokens that the processor adds by itself."""
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    return {"vocab_size": len(tokenizer) + spare, "eos_token_id": tokenizer.eos_token_id, **ids}


def idefics3(path: Path, kind: str = "Idefics3") -> None:
    """56 pixels, patches of 14, four merged into one: 4 tokens a view. SmolVLM is the same model under its own name."""
    tokenizer = _tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"], "<image>")
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama", **TEXT, **_sizes(tokenizer)},
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=True,
    )
    images = getattr(transformers, f"{kind}ImageProcessor")(size={"longest_edge": 4 * 56}, max_image_size={"longest_edge": 56})
    _save(path, config, tokenizer, images, processor_class=f"{kind}Processor", image_seq_len=4)


def paligemma(path: Path, text: str = "gemma2") -> None:
    """56 pixels, patches of 14: 16 tokens a view. No chat template, as on the hub."""
    tokenizer = _tokenizer(["<image>"])
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": text, **TEXT, **_sizes(tokenizer, 1200)}
        | ({"sliding_window": 20} if text == "gemma2" else {}),
        vision_config={**VISION, "model_type": "siglip_vision_model", "image_size": 56, "patch_size": 14, "projection_dim": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=32,
    )
    images = transformers.SiglipImageProcessor(size={"height": 56, "width": 56}, image_seq_length=16)
    _save(path, config, tokenizer, images, processor_class="PaliGemmaProcessor")


def gemma3(path: Path) -> None:
    """56 pixels, patches of 14, pooled to 4 tokens a view; a sliding window shorter than a prompt in two layers of three."""
    named = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}
    tokenizer = _tokenizer(list(named.values()), "<boi>", **named)
    token = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config={
            **TEXT, **_sizes(tokenizer), "sliding_window": 16,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        vision_config={**VISION, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=token("<soft>"), image_token_id=token("<soft>"),
        boi_token_index=token("<boi>"), eoi_token_index=token("<eoi>"),
    )  # fmt: skip
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    _save(path, config, tokenizer, images, processor_class="Gemma3Processor", image_seq_length=4)


def internvl(path: Path) -> None:
    """56 pixels, patches of 14, four merged into one: 4 tokens a view."""
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(list(named.values()), "<IMG_CONTEXT>", **named)
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT, **_sizes(tokenizer)},
        vision_config={**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    images = transformers.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4)
    _save(path, config, tokenizer, images, processor_class="InternVLProcessor", image_seq_length=4)


def llava(path: Path, tower: str = "clip_vision_model") -> None:
    """56 pixels, patches of 14: 16 tokens a view; the tower's class token is left out."""
    tokenizer = _tokenizer(["<image>"], "<image>\n")
    clip = tower == "clip_vision_model"
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT, **_sizes(tokenizer)},
        vision_config={**VISION, "model_type": tower, "image_size": 56, "patch_size": 14},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2 if clip else -1,
        vision_feature_select_strategy="default" if clip else "full",
        image_seq_length=16,
    )
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    own = {"patch_size": 14, "vision_feature_select_strategy": "default" if clip else "full"}
    _save(path, config, tokenizer, images, processor_class="LlavaProcessor", num_additional_image_tokens=int(clip), **own)


def qwen(path: Path, version: str = "3") -> None:
    """64 pixels in patches of 16 (3) or 56 in patches of 14 (2.5), four merged into one: 4 tokens a view."""
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(marks, "<|vision_start|><|image_pad|><|vision_end|>")
    token = tokenizer.convert_tokens_to_ids
    patch = 16 if version == "3" else 14
    pixels = (4 * patch) ** 2
    places = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    ids = dict(
        zip(
            ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"), map(token, marks), strict=True
        )
    )
    eye = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": patch, "out_hidden_size": 32}
    if version == "3":
        eye |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
        config: Any = transformers.Qwen3VLConfig
    else:
        eye |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig
    made = config(
        text_config={**TEXT, **_sizes(tokenizer), "rope_parameters": places}, vision_config=eye, tie_word_embeddings=True, **ids
    )
    images = transformers.Qwen2VLImageProcessor(
        size={"shortest_edge": pixels, "longest_edge": pixels}, patch_size=patch, merge_size=2, temporal_patch_size=2
    )
    _save(path, made, tokenizer, images)
    (path / "nexus.json").write_text(json.dumps({"image_size": 4 * patch}))


def pair(path: Path) -> None:
    """DINOv2 at 56 pixels in patches of 14, 16 of them and a class token a view, beside a BERT."""
    torch.manual_seed(0)
    eye = transformers.Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        mlp_ratio=2,
        layerscale_value=1.0,
    )
    transformers.Dinov2Model(eye).save_pretrained(path / "eye")
    transformers.BitImageProcessor(size={"shortest_edge": 64}, crop_size={"height": 56, "width": 56}).save_pretrained(
        path / "eye"
    )
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *sorted({word for text in SENTENCES for word in text.replace(",", "").split()}),
    ]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    reader = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    transformers.BertModel(reader).save_pretrained(path / "reader")
    tokenizer.save_pretrained(path / "reader")
    (path / "nexus.json").write_text(
        json.dumps({"kind": "pair", "vision": "eye", "text": "reader", "image_size": 56, "query_tokens": 4})
    )


FAMILIES: dict[str, Callable[[Path], None]] = {
    "idefics3": idefics3,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "internvl": internvl,
    "llava": llava,
    "llava_siglip": partial(llava, tower="siglip_vision_model"),
    "paligemma1": partial(paligemma, text="gemma"),
    "qwen3_vl": qwen,
    "qwen2_5_vl": partial(qwen, version="2.5"),
}
