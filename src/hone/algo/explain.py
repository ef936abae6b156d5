"""Each algorithm's loss, its paper and the meaning of its settings, which `hone algos NAME` prints.

A setting has the same meaning in every algorithm that has it. OWN lists exceptions as "algorithm.setting".
In the formulas r = pi/pi_old is the ratio of a token, A its advantage, u the pair's margin
u = log pi/ref (chosen) - log pi/ref (rejected).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in words."""

    meaning: str
    change: str  # when to set it to something else


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm's loss in a formula, the paper it is from, and when to choose it."""

    formula: str
    paper: str
    use: str


GROUP_ADVANTAGE = "A_i = (R_i - mean R) / (std R + 1e-4) over the group's samples"
GAE = "A_t = delta_t + gamma lam A_{t+1}, delta_t = R_t + gamma V_{t+1} - V_t"
CLIPPED = "-min(r A, clip(r, 1 - clip, 1 + clip) A)"
CRITIC = "value (V - return)^2 / 2 - entropy H(pi)"

METHODS: dict[str, Method] = {
    "pretrain": Method(
        "-log pi(token), mean over every token",
        "the language model's maximum likelihood",
        "to make a base model from plain text, or to train one further on the text of a field",
    ),
    "sft": Method(
        "-log pi(token), mean over the tokens of the response",
        "Ouyang et al. 2022, arXiv 2203.02155",
        "first, where there are answers worth imitating; most other methods start from its result",
    ),
    "reward_model": Method(
        "softplus(-(R_chosen - R_rejected - margin)) + centre (R_chosen + R_rejected)^2",
        "Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155",
        "where people or a judge can say which of two answers is better, and no program can check an answer",
    ),
    "pointwise_reward_model": Method(
        "squared: (R - label)^2 / 2; bce: softplus(R) - label R",
        "least squares and logistic regression",
        "where each answer has a grade or a label of its own, and no rival",
    ),
    "process_reward_model": Method(
        "softplus(R_j) - label_j R_j at the last token of each step j",
        "Lightman et al. 2023, arXiv 2305.20050",
        "where the steps of a solution are labelled right or wrong; it ranks answers and guides beam search",
    ),
    "reinforce": Method(
        "-G_t log pi, G_t = sum of gamma^(k-t) R_k over k >= t; summed over a row",
        "Williams 1992",
        "to learn what a policy gradient is: the plainest method, and the noisiest",
    ),
    "reinforce_baseline": Method(
        "-(G_t - b) log pi, b <- decay b + (1 - decay) mean R after each iteration",
        "Williams 1992",
        "with one sample a prompt and no critic: a running mean of rewards takes some of the noise away",
    ),
    "rloo": Method(
        "-(R_i - mean of the group's other R) log pi, summed over a row",
        "Ahmadian et al. 2024, arXiv 2402.14740",
        "with several samples a prompt and one update of each batch: unbiased, no critic, few settings",
    ),
    "reinforce_pp": Method(
        f"{CLIPPED}, A = G_t less beta log(pi_old/ref), whitened over the iteration",
        "Hu 2025, arXiv 2501.03262",
        "with one sample a prompt and no critic: the whole iteration is the baseline",
    ),
    "reinforce_pp_baseline": Method(
        f"{CLIPPED} + beta KL, A = R - group mean, whitened over the iteration",
        "Hu 2025, arXiv 2501.03262",
        "with several samples a prompt, where GRPO's division by a group's own deviation is too noisy",
    ),
    "a2c": Method(
        f"-A log pi + {CRITIC}; {GAE}",
        "Mnih et al. 2016, arXiv 1602.01783",
        "with a critic and one update of each batch: what PPO is built on, for small tasks and for reading",
    ),
    "trpo": Method(
        f"-A r, a natural-gradient step with mean KL(old || new) <= delta; {GAE}",
        "Schulman et al. 2015, arXiv 1502.05477",
        "where each step must stay within a KL that you choose; each step costs several passes",
    ),
    "ppo": Method(
        f"{CLIPPED} + {CRITIC}; {GAE}, whitened",
        "Schulman et al. 2017, arXiv 1707.06347",
        "with a reward model or rewards at many tokens, and several updates of each batch; it trains a critic",
    ),
    "ppo_penalty": Method(
        f"-r A + beta KL(old || pi) + {CRITIC}; beta x 2 where KL > 1.5 kl_target, / 2 where KL < kl_target / 1.5",
        "Schulman et al. 2017, arXiv 1707.06347, section 4",
        "as PPO, where you would rather set the KL of an iteration than a clip",
    ),
    "klq": Method(
        "(Q - lambda-return)^2 / 2, Q = beta log(pi/ref) + V",
        "arXiv 2508.17000",
        "for experiments: it fits values by regression where PPO follows a policy gradient",
    ),
    "grpo": Method(
        f"{CLIPPED} + beta KL, mean over each row, then over rows (see average); {GROUP_ADVANTAGE}",
        "Shao et al. 2024, arXiv 2402.03300",
        "with a verifier and several samples a prompt: the usual first choice, no critic",
    ),
    "dr_grpo": Method(
        f"{CLIPPED} + beta KL, each row divided by max_tokens; A_i = R_i - mean R",
        "Liu et al. 2025, arXiv 2503.20783",
        "as GRPO, where answers get longer without getting better: it divides by neither length nor deviation",
    ),
    "dapo": Method(
        f"-min(r A, clip(r, 1 - low, 1 + high) A), mean over all tokens; {GROUP_ADVANTAGE}; groups of equal rewards "
        "are drawn again",
        "Yu et al. 2025, arXiv 2503.14476",
        "as GRPO for long reasoning, where entropy falls or many groups have equal rewards",
    ),
    "gspo": Method(
        f"-min(s A, clip(s, 1 - low, 1 + high) A), s the geometric mean of a row's r; {GROUP_ADVANTAGE}",
        "Zheng et al. 2025, arXiv 2507.18071",
        "for mixture-of-experts models and long answers, where the ratios of single tokens are noisy",
    ),
    "cispo": Method(
        f"-min(r, max_ratio) A log pi, the weight held fixed; {GROUP_ADVANTAGE}",
        "MiniMax 2025, arXiv 2506.13585",
        "where clipping silences rare tokens that matter: here every token keeps a gradient",
    ),
    "online_dpo": Method(
        "softplus(-beta u), the chosen is the best of a sampled group, the rejected its worst",
        "Guo et al. 2024, arXiv 2402.04792",
        "where a reward ranks answers better than it grades them: only the best and the worst of a group count",
    ),
    "expert_iteration": Method(
        "-log pi on the model's own samples whose reward is at least threshold",
        "Anthony et al. 2017, arXiv 1705.08439",
        "with a strict verifier, where you want SFT's steadiness: it trains on the model's own right answers",
    ),
    "distil": Method(
        "KL(pi || teacher) of the next token, on the model's own samples",
        "Agarwal et al. 2024, arXiv 2306.13649",
        "where a stronger model with the same tokenizer exists: it teaches at every token, without a reward",
    ),
    "dpo": Method(
        "(1 - smoothing) softplus(-beta u) + smoothing softplus(beta u)",
        "Rafailov et al. 2023, arXiv 2305.18290",
        "with pairs of answers, without sampling and without a reward model",
    ),
    "ipo": Method(
        "(u - 1 / (2 beta))^2",
        "Azar et al. 2023, arXiv 2310.12036",
        "as DPO, where pairs are few or their labels certain and DPO overfits: the margin has a goal",
    ),
    "kto": Method(
        "good rows sigmoid(-beta (log pi/ref - z)), bad rows sigmoid(beta (log pi/ref - z)); z: KL on mismatched pairs",
        "Ethayarajh et al. 2024, arXiv 2402.01306",
        "where answers are labelled good or bad one by one, not in pairs",
    ),
    "orpo": Method(
        "-mean log pi(chosen) + odds softplus(-(logit p_chosen - logit p_rejected)), p = exp(mean log pi)",
        "Hong et al. 2024, arXiv 2403.07691",
        "with pairs, from a base model: SFT and preference in one stage, without a reference model",
    ),
    "simpo": Method(
        "softplus(gamma - beta (mean log pi(chosen) - mean log pi(rejected)))",
        "Meng et al. 2024, arXiv 2405.14734",
        "with pairs, without a reference model, where DPO makes answers longer: it compares means a token",
    ),
}

SETTINGS: dict[str, Setting] = {
    "average": Setting(
        "token: every token counts the same; row: every row does",
        "row, where short answers matter as much as long ones",
    ),
    "centre": Setting(
        "pulls the two scores of a pair towards 0, which the pairs alone leave open",
        "0.01, if the scores drift or several reward models are added up",
    ),
    "loss": Setting(
        "squared: the score is a number to be met; bce: the log-odds of good", "bce, where labels are only 0 and 1"
    ),
    "gamma": Setting(
        "what a reward is worth one token earlier",
        "leave it at 1: below 1 the beginning of a long answer learns little",
    ),
    "beta": Setting(
        "strength of the KL to the reference, the model that the run started from; 0 needs no reference model",
        "raise it (0.01 to 0.1) if answers degenerate or cheat the reward; 0 where a verifier cannot be cheated",
    ),
    "kl": Setting(
        "where the KL goes and its estimator: reward:k1, loss:k2, loss:k3, loss:exact; loss:k3*ratio corrects for "
        "several updates a step",
        "loss:exact for the least noise; *ratio with several epochs or minibatches",
    ),
    "kl_target": Setting(
        "KL a token that beta is steered towards; none: beta stays as it is",
        "set it (about 0.01 to 0.1) if no single beta suits the whole run",
    ),
    "decay": Setting(
        "part of the baseline that is kept after each iteration", "raise it towards 1 if an iteration has few rewards"
    ),
    "clip": Setting(
        "how far from 1 a ratio may move before its gradient is cut",
        "lower it (0.1) if clip_fraction stays above 0.3 or the KL leaps; raise it if learning is slow",
    ),
    "lam": Setting(
        "how far the advantage looks ahead: 1 trusts the rewards (no bias, more noise), 0 the critic",
        "towards 1 for one reward at the end of a long answer, lower if the critic is good and learning is noisy",
    ),
    "value": Setting(
        "weight of the critic's loss", "lower it if a shared critic disturbs the policy; own critics do not"
    ),
    "entropy": Setting(
        "weight of a bonus for uncertainty", "raise it (0.001 to 0.01) if entropy falls to 0 and all samples are alike"
    ),
    "bootstrap": Setting(
        "a completion that was cut off is worth what the critic expects of the rest, not 0",
        "true, where many completions are truncated and sample.max_tokens cannot be raised",
    ),
    "delta": Setting("the most mean KL(old || new) of one step", "lower it if steps are rejected or reward falls"),
    "damping": Setting(
        "added to the curvature, so that the step stays short where little is known", "raise it if steps are rejected"
    ),
    "cg_steps": Setting(
        "iterations of the conjugate gradient", "raise it if the step improves little; each costs a pass"
    ),
    "backtracks": Setting("how often a step that leaves the region is halved", "raise it if steps are rejected"),
    "value_clip": Setting(
        "how far the critic may move from its old value in an update; none: freely",
        "none, where rewards are larger than about 1: the clip is in units of reward",
    ),
    "dual": Setting(
        "for A < 0, the ratio beyond which the loss grows no more; none: off",
        "3, if rare tokens with a large ratio upset a run",
    ),
    "exact": Setting(
        "the KL summed over the vocabulary instead of estimated on the sampled token", "true, if beta jumps about"
    ),
    "ratio": Setting(
        "token: each token's own; row: the geometric mean of a row's; trajectory: their product",
        "row for mixture-of-experts models or long answers; trajectory for the unbiased, noisy one",
    ),
    "process": Setting("credit step rewards of a process model", "true, together with process.path=FOLDER"),
    "max_tokens": Setting(
        "the constant by which each row is divided; 0: sample.max_tokens",
        "set it to keep the scale while the limit changes",
    ),
    "low": Setting("how far below 1 a ratio may fall before its gradient is cut", "lower it if the KL leaps"),
    "high": Setting(
        "how far above 1 a ratio may rise before its gradient is cut",
        "raise it if entropy falls: rare tokens may then grow",
    ),
    "overlong": Setting(
        "shape: a penalty near the length limit; filter: truncated rows are left out; off: neither",
        "filter, where a truncated answer says nothing; off, where length is no trouble",
    ),
    "limit": Setting(
        "tokens at which the penalty is -1; 0: sample.max_tokens", "set it below sample.max_tokens for shorter answers"
    ),
    "margin": Setting(
        "tokens before the limit over which the penalty grows; 0: a fifth of it", "widen it for a gentler slope"
    ),
    "max_ratio": Setting("the largest weight of a token", "lower it (2) if rare tokens upset a run"),
    "smoothing": Setting(
        "share of pairs that are thought to be labelled the wrong way round", "0.1 to 0.3 where labels are noisy"
    ),
    "threshold": Setting(
        "the reward from which a sample is trained on", "lower it where the reward has values between 0 and 1"
    ),
    "keep": Setting(
        "the most samples of a prompt; 0: all", "set it (1 to 4) so that easy prompts do not outweigh hard ones"
    ),
    "top_k": Setting(
        "KL over the student's so many likeliest tokens and one bucket for the rest; 0: over the whole vocabulary",
        "64 or so, if the teacher's whole distribution does not fit the memory",
    ),
    "good": Setting(
        "weight of the good rows", "so that good x their number is about bad x the others', if they are uneven"
    ),
    "bad": Setting(
        "weight of the bad rows", "so that good x their number is about bad x the others', if they are uneven"
    ),
    "odds": Setting("weight of the odds ratio beside the NLL of the chosen", "raise it if the rejected stay as likely"),
}

OWN: dict[str, Setting] = {
    "a2c.entropy": Setting(
        "weight of a bonus for uncertainty",
        "raise it (0.03) if entropy falls to 0 and all samples are alike, lower it (0.001) if it does not fall",
    ),
    "trpo.beta": Setting(
        "strength of the KL to the reference, in the reward; 0: none", "raise it if answers cheat the reward"
    ),
    "ppo_penalty.beta": Setting("the first weight of KL(old || pi), which then follows kl_target", "seldom: it adapts"),
    "ppo_penalty.kl_target": Setting(
        "KL(old || pi) of an iteration that beta holds", "raise it if learning is slow, lower it if the reward falls"
    ),
    "klq.beta": Setting(
        "temperature of Q = beta log(pi/ref) + V: also the strength of the KL",
        "raise it to stay nearer to the reference",
    ),
    "grpo.average": Setting(
        "row: every answer counts the same; token: every token does, as in DAPO; limit: each answer is divided by "
        "sample.max_tokens, as in Dr. GRPO",
        "token or limit, where answers differ much in length: by row, a long wrong answer costs little a token",
    ),
    "grpo.lam": Setting(
        "with a process model as value: how far a step's credit looks ahead, 1 without bias; none: not used",
        "1, together with process.path=FOLDER; the lower, the more the process model's errors are believed",
    ),
    "gspo.low": Setting(
        "how far below 1 a row's ratio may fall; a mean over tokens moves little, so this is small",
        "seldom: raise it for short answers",
    ),
    "gspo.high": Setting("how far above 1 a row's ratio may rise", "seldom: raise it for short answers"),
    **{
        f"{name}.beta": Setting(
            "how strongly pi is held to the reference: the implicit reward is beta log pi/ref",
            "lower it (0.01 to 0.05) to move further from the reference, raise it (0.3) if answers degenerate",
        )
        for name in ("dpo", "online_dpo", "kto")
    },
    "ipo.beta": Setting(
        "the margin to be reached is 1 / (2 beta), in nats of log pi/ref", "raise it to stay nearer to the reference"
    ),
    "simpo.beta": Setting("scale of the margin between mean log-probs", "2 to 10; raise it together with gamma"),
    "simpo.gamma": Setting(
        "the margin by which the chosen is to lead, after beta", "half to one of beta; lower it if accuracy falls"
    ),
}


def setting(algorithm: str, name: str) -> Setting:
    """What the algorithm's setting means."""
    return OWN.get(f"{algorithm}.{name}") or SETTINGS[name]
