"""Text output of `raytrain-hpc plan`."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.planner.layout import Layout


def format_plan(plan: dict[str, Any], max_rows: int = 8) -> list[str]:
    """Format a plan for the terminal: the verdict, the best layout, its expected cost, and a table of layouts."""
    cluster, batching, failures, budget = plan["machine"], plan["microbatches"], plan["failures"], plan["budget"]
    device = cluster["device"]
    per_rank = sorted(set(plan["microbatches_per_rank"]))
    microbatches = f"{per_rank[0]}" if len(per_rank) == 1 else f"{per_rank[0]} or {per_rank[-1]}"
    hours, minutes = failures["between_failures_s"] / 3600, failures["save_every_s"] / 60
    lines = [
        f"verdict       {plan['verdict']}",
        *(f"remedy        {remedy}" for remedy in plan["remedies"]),
        f"cluster       {cluster['nodes']} x {cluster['per_node']} {device['name']}; {cluster['inside']['name']} "
        f"inside a node, {cluster['across']['name']} between nodes",
        f"layout        {_describe_layout(plan['layout'])}",
        f"placement     {plan['placement']}",
        f"microbatches  {batching['count']} of {batching['size']} sequences; a data-parallel rank runs {microbatches}",
        f"parameters    {plan['parameters']:,}",
        f"state         {plan['state_bytes_per_rank'] / 2**30:.2f} GiB per worker, without activations",
        *_format_host_memory(plan["memory"]["host"]),
        f"compute       {plan['flops_per_token'] / 1e9:.3f} GFLOP per token; mfu counts {plan['flops_convention']}",
        f"budget        {budget['tokens']:.3g} tokens: {_format_days(budget['days'])}, "
        f"{_format_hours(budget['device_hours'])} device hours",
        f"failures      one in {hours:,.1f} h ({failures['device_hours']:,.0f} h per device); best checkpoint interval "
        f"{minutes:,.1f} min",
        f"goodput       {100 * failures['in_memory']:.2f}% in memory ({failures['pause_s']:g} s per failure), "
        f"{100 * failures['from_checkpoints']:.2f}% from checkpoints ({failures['restart_s']:g} s to restart)",
    ]
    return [*lines, "", *_format_table(plan["layouts"][:max_rows]), *_format_omitted(plan["layouts"], max_rows)]


def _format_host_memory(host_bytes: int) -> list[str]:
    return [f"host memory   {host_bytes / 2**30:.2f} GiB per worker, for what is offloaded"] if host_bytes else []


def _describe_layout(layout: dict[str, Any]) -> str:
    schedule = f", schedule={layout['schedule']}" if layout["pp"] > 1 else ""
    return f"{Layout(**layout).describe()}{schedule}"


def _format_days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else f"{_format_hours(24 * days)} hours"


def _format_hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"


def _format_omitted(layouts: list[dict[str, Any]], max_rows: int) -> list[str]:
    fitting = sum(row["fits"] for row in layouts)
    return [f"{len(layouts)} legal layouts, {fitting} fit; --json prints all"] if len(layouts) > max_rows else []


def _format_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["dp_rep dp_shard  tp  cp  pp  ep zero  micro x acc  recompute       step s     tok/s    mfu     GiB  why"]
    for row in rows:
        savings = _describe_savings(row)
        microbatches = f"{row['micro_batch_size']} x {row['grad_acc']}"
        lines.append(
            f"{row['dp_replicate']:>6} {row['dp_shard']:>8} {row['tp']:>3} {row['cp']:>3} {row['pp']:>3} "
            f"{row['ep']:>3} {row['zero']:>4}  {microbatches:>11}  {savings:<13} {row['step_time_s']:>8.3f} "
            f"{row['tokens_per_sec']:>9.3g} {100 * row['mfu']:>5.1f}% {row['memory_gib']:>7.1f}  {row['why']}"
        )
    return lines


def _describe_savings(row: dict[str, Any]) -> str:
    """Format what saves memory: "full:4+acts+cpu" recomputes 4 layers of a stage and offloads activations and state."""
    layers = f":{row['recompute_layers']}" if row["recompute_layers"] else ""
    activations = "+acts" if row["activation_offload"] != "none" else ""
    state = f"+{row['offload']}" if row["offload"] != "none" else ""
    return f"{row['activation_checkpointing']}{layers}{activations}{state}"
