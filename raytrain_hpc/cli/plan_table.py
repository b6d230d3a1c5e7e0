"""What `raytrain-hpc plan` prints of a plan."""

from __future__ import annotations

from typing import Any


def format_plan(plan: dict[str, Any], max_rows: int = 8) -> list[str]:
    """A plan for a terminal: the verdict, the best layout and the ones after it, and what to expect."""
    cluster, cut, expected, budget = plan["machine"], plan["microbatches"], plan["failures"], plan["budget"]
    device = cluster["device"]
    axes = "  ".join(f"{axis}={size}" for axis, size in plan["layout"].items())
    shares = sorted(set(plan["microbatches_per_rank"]))
    runs = f"{shares[0]}" if len(shares) == 1 else f"{shares[0]} or {shares[-1]}"
    hours, minutes = expected["between_failures_s"] / 3600, expected["save_every_s"] / 60
    lines = [
        f"verdict       {plan['verdict']}",
        *(f"remedy        {remedy}" for remedy in plan["remedies"]),
        f"cluster       {cluster['nodes']} x {cluster['per_node']} {device['name']}; {cluster['inside']['name']} "
        f"inside a node, {cluster['across']['name']} across",
        f"layout        {plan['workers']} workers: {axes}",
        f"placement     {plan['placement']}",
        f"microbatches  {cut['count']} of {cut['size']} sequences; a data-parallel rank runs {runs}",
        f"parameters    {plan['parameters']:,}",
        f"state         {plan['state_bytes_per_rank'] / 2**30:.2f} GiB a worker, without activations",
        f"compute       {plan['flops_per_token'] / 1e9:.3f} GFLOP a token; mfu counts {plan['flops_convention']}",
        f"budget        {budget['tokens']:.3g} tokens: {budget['days']:.2f} days, "
        f"{budget['device_hours']:,.0f} device hours",
        f"failures      one in {hours:,.1f} h ({expected['device_hours']:,.0f} h a device); best saved every "
        f"{minutes:,.1f} min",
        f"goodput       {100 * expected['in_memory']:.2f}% going on in memory ({expected['pause_s']:g} s a failure), "
        f"{100 * expected['from_checkpoints']:.2f}% from checkpoints ({expected['restart_s']:g} s to start again)",
    ]
    return [*lines, "", *_format_table(plan["layouts"][:max_rows]), *_format_omitted(plan["layouts"], max_rows)]


def _format_omitted(layouts: list[dict[str, Any]], max_rows: int) -> list[str]:
    fitting = sum(row["fits"] for row in layouts)
    return [f"{len(layouts)} legal layouts, {fitting} fit; --json prints all"] if len(layouts) > max_rows else []


def _format_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["dp_rep dp_shard  tp  cp  pp  ep zero  micro x acc  recompute    step s     tok/s    mfu     GiB  why"]
    for row in rows:
        cut = f"{row['micro_batch']} x {row['grad_acc']}"
        kept = row["recompute"] if row["offload"] == "none" else f"{row['recompute']}+{row['offload']}"
        lines.append(
            f"{row['dp_replicate']:>6} {row['dp_shard']:>8} {row['tp']:>3} {row['cp']:>3} {row['pp']:>3} "
            f"{row['ep']:>3} {row['zero']:>4}  {cut:>11}  {kept:<10} {row['step_time_s']:>8.3f} "
            f"{row['tokens_per_sec']:>9.3g} {100 * row['mfu']:>5.1f}% {row['memory_gib']:>7.1f}  {row['why']}"
        )
    return lines
