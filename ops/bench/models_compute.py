"""Model benches within one process: forwards, whole steps, the cache, packing. Ratios above 1 are gains."""

from dataclasses import replace
from functools import partial
from typing import Any

from nexus_bus.learning.group import GroupTrainer, Member
from nexus_bus.models.backbone import Backbone
from nexus_bus.models.cache import FeatureCache, encode_cached
from nexus_bus.models.features import Look
from nexus_bus.models.prompt import Prompt
from ops.bench.models_base import Bench, Numbers, looks, members
from schemas.job import LoraSpec

TENANTS, LOCAL = (2, 4, 8), (1, 2, 4)
GROUP = 32  # samples that every point of the batch curve encodes
HEADS = ("oft", "gr00t", "pi", "fast")
MIXED = ["oft", "gr00t", "pi", "oft", "gr00t", "pi", "oft", "gr00t"]
FRAMES = 64
LONG = ("touch the red block", "push the blue block to the left and then open the upper drawer", "stop", "open the drawer")


def forward(bench: Bench) -> Numbers:
    """One grouped forward against one forward a tenant, which is what a service without groups does."""
    found: Numbers = {}
    grid = [(8, 1)] if bench.quick else [(tenants, local) for tenants in TENANTS for local in LOCAL]
    for suffix, backbone in bench.backbones.items():
        for tenants, local in grid:
            group = looks(tenants * local, tenants)
            parts = [group[i : i + local] for i in range(0, len(group), local)]
            spent = bench.time(serial=partial(_each, backbone, parts), grouped=partial(backbone.encode, group))
            found[f"group_forward_x_{tenants}x{local}{suffix}"] = spent["serial"] / spent["grouped"]
            if (tenants, local) == (8, 1):
                found[f"forward_ms_serial_8x1{suffix}"] = spent["serial"] * 1e3
                found[f"forward_ms_grouped_8x1{suffix}"] = spent["grouped"] * 1e3
    return found


def curve(bench: Bench) -> Numbers:
    """Milliseconds a sample by the size of a forward (one tenant), and how close groups of 8 tenants come to its best point."""
    found: Numbers = {}
    sizes = (1, 8) if bench.quick else (1, 2, 4, 8, 16, 32)
    for suffix, backbone in bench.backbones.items():
        one, many = looks(GROUP), looks(GROUP, 8)
        works = {f"{size}": partial(_each, backbone, _cut(one, size)) for size in sizes}
        works |= {f"of_8x{local}": partial(_grouped, backbone, _cut(many, 8 * local)) for local in LOCAL}
        spent = bench.time(**works)
        best = min(spent[f"{size}"] for size in sizes)
        found |= {f"batch_{size}_ms{suffix}": spent[f"{size}"] / GROUP * 1e3 for size in sizes}
        shares = {local: best / spent[f"of_8x{local}"] for local in LOCAL}
        found |= {f"group_forward_of_best_batch_8x{local}{suffix}": share for local, share in shares.items()}
        found[f"group_forward_of_best_batch{suffix}"] = shares[4]  # the paper's largest group, 8 tenants with 4 samples each
    return found


def steps(bench: Bench) -> Numbers:
    """Features, loss, backward and step of 8 tenants together, against one after another."""
    found: Numbers = {}
    for suffix, backbone in bench.trained.items():
        for head in (*HEADS, "mixed"):
            group = members(backbone, MIXED if head == "mixed" else [head] * 8, 1)
            spent = _together(bench, backbone, group)
            found[f"group_step_x_8x1_{head}{suffix}"] = spent["serial"] / spent["grouped"]
            found[f"step_ms_grouped_8x1_{head}{suffix}"] = spent["grouped"] * 1e3
        found[f"group_step_x_8x1{suffix}"] = found[f"group_step_x_8x1_oft{suffix}"]
    return found


def lora(bench: Bench) -> Numbers:
    """8 adapters of rank 8 in one forward and backward, against adapter by adapter; and what is saved where frames come again:
    what the vision tower made of them, and with last layers alone adapted all that lies below."""
    found: Numbers = {}
    for suffix, backbone in bench.trained.items():
        for local in (1,) if bench.quick else (1, 4):
            group = members(backbone, ["oft"] * 8, local, LoraSpec())
            for member in group:
                member.slot.tenant = ""  # nobody's: every frame is looked at as if for the first time
            spent = _together(bench, backbone, group)
            found[f"lora_group_x_8x{local}{suffix}"] = spent["serial"] / spent["grouped"]
            found[f"lora_ms_grouped_8x{local}{suffix}"] = spent["grouped"] * 1e3
        whole, first = (members(backbone, ["oft"] * 8, 1, LoraSpec(last_layers=layers)) for layers in (0, 1))
        for member in (*whole, *first):
            member.slot.tenant = ""
        again, last = (members(backbone, ["oft"] * 8, 1, LoraSpec(last_layers=layers)) for layers in (0, 1))
        plain, keeping = GroupTrainer(backbone), GroupTrainer(backbone, FeatureCache())
        times = bench.time(
            whole=lambda run=plain.run, group=whole: _learned(run(group)),
            again=lambda run=plain.run, group=again: _learned(run(group)),
            first=lambda run=plain.run, group=first: _learned(run(group)),
            last=lambda run=keeping.run, group=last: _learned(run(group)),
        )
        found[f"lora_pictures_again_x{suffix}"] = times["whole"] / times["again"]
        found[f"lora_last_layer_again_x{suffix}"] = times["first"] / times["last"]
    return found


def cache(bench: Bench) -> Numbers:
    """A second pass over frames that are known, from memory and from the disk, against encoding them again."""
    found: Numbers = {}
    for suffix, backbone in bench.trained.items():
        frames = _cut(looks(FRAMES), 16)
        directory = bench.directory / f"features{suffix}"
        memory, disk = FeatureCache(directory), FeatureCache(directory, memory_bytes=0)
        _grouped(backbone, frames, memory)
        spent = bench.time(
            again=partial(_grouped, backbone, frames),
            memory=partial(_grouped, backbone, frames, memory),
            disk=partial(_grouped, backbone, frames, disk),
        )
        found[f"cache_second_pass_x{suffix}"] = spent["again"] / spent["memory"]
        found[f"cache_second_pass_disk_x{suffix}"] = spent["again"] / spent["disk"]
        found[f"cache_hit_us{suffix}"] = spent["memory"] / FRAMES * 1e6
        memory.close()
        disk.close()
    return found


def packing(bench: Bench) -> Numbers:
    """Prompts of different lengths as they are, against all as long as the longest, which is what padding costs."""
    found: Numbers = {}
    for suffix, backbone in bench.trained.items():
        ragged, padded = looks(16, 8, LONG), looks(16, 8, (max(LONG, key=len),))
        spent = bench.time(ragged=partial(backbone.encode, ragged), padded=partial(backbone.encode, padded))
        found[f"packing_x{suffix}"] = spent["padded"] / spent["ragged"]
        lengths = [[backbone.family.text(look.prompt.instruction, 1).ids.numel() for look in part] for part in (ragged, padded)]
        found[f"packing_tokens_x{suffix}"] = sum(lengths[1]) / sum(lengths[0])  # what could be saved
    return found


def _cut(items: list[Look], size: int) -> list[list[Look]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _each(backbone: Backbone, parts: list[list[Look]]) -> None:
    for part in parts:
        backbone.encode(part)


def _grouped(backbone: Backbone, parts: list[list[Look]], cache: FeatureCache | None = None) -> None:
    """As the workers do it: pictures that have just come, names and look-ups included."""
    for part in parts:
        new = [replace(look, prompt=Prompt(look.prompt.images, look.prompt.instruction)) for look in part]
        encode_cached(backbone, new, cache)


def _together(bench: Bench, backbone: Backbone, group: list[Member]) -> dict[str, float]:
    trainer = GroupTrainer(backbone)
    return bench.time(
        serial=lambda: [_learned(trainer.run([member])) for member in group], grouped=lambda: _learned(trainer.run(group))
    )


def _learned(results: list[Any]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error
