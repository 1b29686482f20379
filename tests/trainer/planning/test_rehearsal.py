"""Rehearsals compared with the ranks of real runs; and what a rehearsal refuses, with the reason."""

import json

import pytest
import yaml
from planned_modules import MixedGPT
from rehearsed_run import NUMBER, SEED, kind_for, noted_by_ranks
from sweep import IS_SWEEP

from echelon.testing import run_ranks
from echelon.trainer.cli.main import main


def parallel(**degrees):
    return {"_target_": "echelon.ParallelStrategy", **degrees}


LAYOUTS = {
    "tp x cp": (parallel(tp=2, cp=2), {}),
    "pp x fsdp": (parallel(pp=2), {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
}
ASKED = {"tp x cp": (1,), "pp x fsdp": (3,)}
if IS_SWEEP:
    LAYOUTS |= {
        "hsdp": ({"_target_": "echelon.FSDPStrategy", "replicate": 2}, {}),
        "ep x fsdp": (parallel(dp_shard=4, ep=2), {}),
        "ddp": ("ddp", {}),
        "fsdp": ("fsdp", {}),
        "tp x fsdp": (parallel(tp=2), {}),
        "cp x fsdp": (parallel(cp=2), {}),
        "pp x cp": (parallel(pp=2, cp=2), {"accumulate_grad_batches": 2}),
        "pp x ep": (parallel(pp=2, dp_shard=2, ep=2), {"accumulate_grad_batches": 2}),
    }
    ASKED = {**dict.fromkeys(LAYOUTS, (0, 3)), "ddp": (0,)}  # of replicas, rank 0 alone writes files
CONFIG = {
    "seed": SEED,
    "trainer": {"max_epochs": 1},
    "data": {"_target_": "rehearsed_run.Tokens"},
}


def rehearsed(capsys, folder, words, *, number=NUMBER, kind="ShortGPT", **trainer):
    """Return the exit code of a rehearsal, and what it says of each rank."""
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}, "data": {**CONFIG["data"], "number": number}}
    config["module"] = {"_target_": f"planned_modules.{kind}"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    code = main(["rehearse", str(folder / "config.yaml"), "--json", *words])
    return code, json.loads(capsys.readouterr().out)["ranks"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What each of four ranks notes of itself, by layout."""
    return run_ranks(noted_by_ranks, 4, LAYOUTS, tmp_path_factory.mktemp("runs"), timeout=800)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_rehearsal_says_of_ranks_is_what_real_ranks_do(capsys, tmp_path, real, name):
    strategy, settings = LAYOUTS[name]
    words = ["--nodes", "2", "--nproc", "2", *(f"--rank={rank}" for rank in ASKED[name])]
    kind = kind_for(name)
    code, said = rehearsed(capsys, tmp_path, words, strategy=strategy, kind=kind.__name__, **settings)
    assert code == 0, said
    for one in said:
        rank, found = one["rank"], real[one["rank"]][name]
        where = f"{name}, rank {rank}"
        assert found["samples"][: len(one["first_samples"])] == one["first_samples"], where
        assert len(found["samples"]) == one["shares"]["here"], where
        assert sum(one["shares"]["by_rank"]) == one["shares"]["num_entries"] == NUMBER, where
        assert [group["num_elements"] for group in one["groups"]] == found["groups"], where
        for part in ("parameters", "gradients", "optimizer"):
            # under ddp the counts of targets, two numbers of 8 bytes, are gradients in a bucket
            counts = 16 * (name == "ddp" and part == "gradients")
            assert one["memory"][part] + counts == found[part], f"{where}, {part}"
        sent = {tuple(row["ranks"]): row["bytes"] for row in one["sent"] if row["bytes"] > 4000}
        assert sent == pytest.approx(found["sent"], rel=0.02 if kind is MixedGPT else 0.01), where
        own = {file: size for file, size in one["files"].items() if file != "state.json"}
        assert own.items() <= found["files"].items(), where
        assert own, where
        assert one["node_rank"] == rank // 2, where


def test_ranks_of_a_thousand_take_their_places(capsys, tmp_path):
    words = ["--nodes", "128", "--nproc", "8", "--rank", "517"]
    code, [one] = rehearsed(capsys, tmp_path, words, strategy="hsdp", number=3000)
    assert code == 0, one
    assert one["axes"]["dp_replicate"]["place"] == one["node_rank"] == 64
    assert one["axes"]["dp_shard"] == {"degree": 8, "place": 5, "ranks": list(range(512, 520))}
    assert one["axes"]["dp_replicate"]["ranks"] == list(range(5, 1024, 8))
    assert one["shares"]["here"] == 3 - (517 >= 3000 - 2048)
    assert sum(one["shares"]["by_rank"]) == 3000
    # of the shards that 128 replicas hold, each writes some
    assert all(name.endswith("-00518-of-01024.safetensors") for name in one["files"])


REFUSED = {
    "a product that is not the number of ranks": (parallel(tp=3), {}, "tp = 3, but world_size is 128"),
    "heads that ranks cannot share": (parallel(tp=8), {}, "[-1, 16] don't multiply up to the size of dim 2 (8)"),
    "replicas that do not divide the ranks": (
        {"_target_": "echelon.FSDPStrategy", "replicate": 3},
        {},
        "replicate must divide world_size=128, got 3",
    ),
    "more stages than blocks": (parallel(pp=4), {"accumulate_grad_batches": 4}, "2 repeated blocks for 4 stages"),
    "fewer micro-batches than stages": (parallel(pp=2), {}, "accumulate_grad_batches must be at least 2"),
    "stages and offloaded shards": (
        parallel(pp=2, cpu_offload=True),
        {"accumulate_grad_batches": 2},
        "pp=2 cannot be combined with cpu_offload",
    ),
    "a policy that matches nothing": (
        {"_target_": "echelon.FSDPStrategy", "policy": ["nowhere"]},
        {},
        "nowhere",
    ),
    "one process for all": ("single", {}, "runs in one process"),
    "a global batch smaller than the ranks": ("ddp", {"global_batch_size": 64}, "is less than one sample for each"),
    "a rank without a sample under a collective forward": ("fsdp", {}, "none in the first step"),
    "two open degrees": (parallel(tp="auto"), {}, "At most one degree can be 'auto'"),
}


OF_THE_STRATEGY = (
    *("heads that ranks cannot share", "replicas that do not divide the ranks", "stages and offloaded shards"),
    *("a policy that matches nothing", "two open degrees"),
)
"""What a strategy refuses as it does in a run; a rehearsal tells it as it tells the others."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.only_in_sweep] * (case in OF_THE_STRATEGY)) for case in REFUSED],
)
def test_a_layout_that_cannot_work_is_refused_with_the_reason(capsys, tmp_path, case):
    strategy, settings, reason = REFUSED[case]
    code, [one] = rehearsed(capsys, tmp_path, ["--nodes", "16", "--nproc", "8"], strategy=strategy, **settings)
    assert code == 1
    assert reason in "\n".join(one["problems"]), one
