"""A metric's chart with its title, as the curves and the reward-hacking view of the report show it."""

from collections.abc import Sequence
from typing import Any

from hone.report import chart as chart
from hone.report.samples import text

TITLES = {  # of metrics, in the order of their charts; others follow by name
    "loss": "loss",
    "reward": "reward",
    "accuracy": "accuracy",
    "ref_kl": "KL to the reference",
    "entropy": "entropy",
    "length": "length",
    "format": "format rate",
    "grad_norm": "gradient norm",
    "clip_fraction": "clipped share",
    "gen_kl": "KL sampler to learner",
    "ess": "effective sample size",
    "explained_variance": "explained variance",
    "repetition": "repetition",
    "disagreement": "held-out verifier disagrees",
    "hacked": "rewarded but held-out verifier refuses",
    "truncated": "truncated share",
    "lr": "learning rate",
    "tokens_per_second": "tokens a second",
}


def figure(rows: Sequence[dict[str, Any]], name: str) -> str:
    """A metric of a run's rows under its title, with its last value."""
    data = chart.series(rows, name)
    title = TITLES.get(name, name.replace("_", " "))
    points = data.points
    last = f"<b>{chart.label(points[-1][1])}</b>" if points else ""
    lost = f"<em>{len(data.lost)} not finite</em>" if data.lost else ""
    return (
        f'<figure class="card"><figcaption><span>{text(title)}</span>{lost}{last}</figcaption>'
        f"{chart.svg(data, name=title)}</figure>"
    )
