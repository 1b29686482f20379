"""Rehearsals compared with the ranks of real runs; and what a rehearsal refuses, with the reason."""

import json

import pytest
import yaml
from planned_modules import MixedGPT
from rehearsed_run import SEED, noted_by_ranks

from echelon.testing import run_ranks
from echelon.trainer.cli.main import main


def parallel(**degrees):
    return {"_target_": "echelon.ParallelStrategy", **degrees}


LAYOUTS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "hsdp": ({"_target_": "echelon.FSDPStrategy", "replicate": 2}, {}),
    "tp x fsdp": (parallel(tp=2), {}),
    "cp x fsdp": (parallel(cp=2), {}),
    "pp x fsdp": (parallel(pp=2), {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
    "pp x cp": (parallel(pp=2, cp=2), {"accumulate_grad_batches": 2}),
}
OF_EXPERTS = {
    "ep x fsdp": (parallel(dp_shard=4, ep=2), {}),
    "pp x ep": (parallel(pp=2, dp_shard=2, ep=2), {"accumulate_grad_batches": 2}),
}
ASKED = {
    "ddp": (0,),
    "fsdp": (0, 3),
    "hsdp": (3,),
    "tp x fsdp": (1,),
    "cp x fsdp": (1,),
    "pp x fsdp": (3,),
    "pp x cp": (0, 3),
}
CONFIG = {
    "seed": SEED,
    "trainer": {"max_epochs": 1},
    "data": {"_target_": "rehearsed_run.Tokens"},
}


def rehearsed(capsys, folder, words, *, number=27, kind="GPT", **trainer):
    """Return the exit code of a rehearsal, and what it says of each rank."""
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}, "data": {**CONFIG["data"], "number": number}}
    config["module"] = {"_target_": f"planned_modules.{kind}"}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    code = main(["rehearse", str(folder / "config.yaml"), "--json", *words])
    return code, json.loads(capsys.readouterr().out)["ranks"]


@pytest.mark.timeout(1200)
def test_what_a_rehearsal_says_of_ranks_is_what_real_ranks_do(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    real = run_ranks(noted_by_ranks, 4, LAYOUTS, tmp_path / "runs", timeout=800)
    compare(capsys, tmp_path, real, LAYOUTS, ASKED)


@pytest.mark.slow
def test_a_rehearsal_of_experts_lets_all_have_as_many_tokens(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    real = run_ranks(noted_by_ranks, 4, OF_EXPERTS, tmp_path / "runs", MixedGPT, timeout=200)
    compare(capsys, tmp_path, real, OF_EXPERTS, dict.fromkeys(OF_EXPERTS, (0, 3)), 0.02, kind="MixedGPT")


def compare(capsys, folder, real, layouts, asked, close=0.01, **which):
    """Compare what rehearsals say of ranks with what real ranks have noted; real ones first agree on their order."""
    for name, (strategy, settings) in layouts.items():
        words = ["--nodes", "2", "--nproc", "2", *(f"--rank={rank}" for rank in asked[name])]
        code, said = rehearsed(capsys, folder, words, strategy=strategy, **settings, **which)
        assert code == 0, said
        for one in said:
            rank, found = one["rank"], real[one["rank"]][name]
            where = f"{name}, rank {rank}"
            assert found["samples"][: len(one["first_samples"])] == one["first_samples"], where
            assert len(found["samples"]) == one["shares"]["here"], where
            assert sum(one["shares"]["by_rank"]) == one["shares"]["num_entries"] == 27, where
            assert [group["num_elements"] for group in one["groups"]] == found["groups"], where
            for kind in ("parameters", "gradients", "optimizer"):
                assert one["memory"][kind] == found[kind], f"{where}, {kind}"
            sent = {tuple(row["ranks"]): row["bytes"] for row in one["sent"] if row["bytes"] > 4000}
            assert sent == pytest.approx(found["sent"], rel=close), where
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
    "more stages than blocks": (parallel(pp=4), {"accumulate_grad_batches": 4}, "3 repeated blocks for 4 stages"),
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


@pytest.mark.parametrize("case", REFUSED)
def test_a_layout_that_cannot_work_is_refused_with_the_reason(capsys, tmp_path, case):
    strategy, settings, reason = REFUSED[case]
    code, [one] = rehearsed(capsys, tmp_path, ["--nodes", "16", "--nproc", "8"], strategy=strategy, **settings)
    assert code == 1
    assert reason in "\n".join(one["problems"]), one
