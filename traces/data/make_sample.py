"""Write synthetic_azure_conv.csv: `python make_sample.py [OUT]`.

A synthetic trace in the schema of the public Azure LLM inference traces. It is drawn from the
figures below and nothing else; they summarise the conversation trace of November 2023 (19,366
requests in one hour; Azure/AzurePublicDataset, CC-BY), rounded to three digits. Only the standard
library is used, and of `random` only what Python promises to keep, so that the file comes out the
same everywhere. See README.md.
"""

from __future__ import annotations

import datetime
import math
import random
import sys
from pathlib import Path
from statistics import NormalDist

REQUESTS = 2_000
RATE = 5.53
"""Requests per second, mean."""
RATE_SWING, SWING_S = 0.12, 60.0
"""The rate drifts slowly: standard deviation of its logarithm, and how long that is remembered.
Around it arrivals are Poisson. In six minutes of the public trace the coefficient of variation of
the gaps is 1.00 to 1.06, and the variance of counts in 10 s 0.9 to 2.5 times their mean; here 1.01
and 1.7.
"""

START = datetime.datetime(2030, 1, 1)
"""A date that no trace has."""

PROMPT_AT = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
OUTPUT_AT = (0.0, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
CLASSES = """
 2.1 | 2 10 17 30 62 91 99                 | 16 16 98 136 163 185 201 237 265
 1.5 | 103 120 120 128 165 169 174         | 11 12 12 160 202 217 217 223 224
 2.4 | 175 181 181 181 181 181 189         | 47 73 107 131 179 246 282 1000 1000
 4.8 | 190 194 200 203 206 209 209         | 37 73 161 179 212 217 217 221 258
 2.8 | 210 212 215 225 238 247 299         | 14 14 58 86 132 179 217 217 223
 7.4 | 300 330 373 379 385 387 389         | 7 18 59 73 88 101 114 147 436
15.2 | 390 393 396 401 407 413 419         | 25 78 89 98 113 137 148 178 200
 3.8 | 420 421 425 434 457 583 697         | 31 63 86 95 109 131 158 338 739
 6.7 | 700 819 890 957 984 994 999         | 10 49 97 391 414 443 487 601 921
11.2 | 1000 1010 1020 1030 1050 1050 1060  | 30 366 394 405 426 468 538 645 992
14.4 | 1060 1070 1080 1100 1120 1140 1150  | 28 363 394 407 429 500 560 669 1000
 3.2 | 1150 1150 1160 1170 1180 1190 1200  | 29 57 388 404 428 507 596 656 992
 7.5 | 1200 1220 1260 1310 1320 1390 1500  | 26 52 124 178 376 415 440 593 954
 2.8 | 1500 1540 1620 1760 1890 1970 2000  | 24 45 63 86 108 129 143 183 594
 5.5 | 2000 2100 2230 2480 2700 3070 3500  | 15 42 66 89 118 147 164 203 458
 0.5 | 3510 3570 3620 3750 3860 3940 4040  | 43 46 71 107 140 168 185 219 237
 6.8 | 4070 4080 4080 4080 4090 4100 4110  | 17 28 40 51 71 108 142 322 757
 1.5 | 4110 4120 4130 4180 5080 5940 14000 | 25 38 52 72 103 134 160 231 755
"""
"""The requests by prompt length: per cent of them, quantiles of their prompts, quantiles of their
outputs (tokens). The public trace is a mixture of applications: prompts and outputs have several
narrow peaks, and outputs depend on prompts in no simple way."""


def quantile(u: float, at: tuple[float, ...], tokens: tuple[int, ...]) -> int:
    """The `u`-quantile, in whole tokens, log-linear between the given ones."""
    right = next(i for i in range(1, len(at)) if u <= at[i])
    part = (u - at[right - 1]) / (at[right] - at[right - 1])
    low, high = math.log(tokens[right - 1]), math.log(tokens[right])
    return round(math.exp(low + part * (high - low)))


def spread(n: int, rng: random.Random) -> list[float]:
    """`n` uniform numbers, one in each n-th of [0, 1), in random order."""
    values = [(i + rng.random()) / n for i in range(n)]
    return sorted(values, key=lambda _: rng.random())


def lengths(rng: random.Random) -> list[tuple[int, int]]:
    """(prompt, output) tokens of all requests, in random order."""
    classes = [line.split("|") for line in CLASSES.strip().splitlines()]
    total = sum(float(share) for share, _, _ in classes)
    pairs: list[tuple[int, int]] = []
    upto = 0.0
    for share, *columns in classes:
        prompts, outputs = (tuple(map(int, column.split())) for column in columns)
        upto += float(share) / total * REQUESTS
        n = round(upto) - len(pairs)
        for u, v in zip(spread(n, rng), spread(n, rng), strict=True):
            pairs.append((quantile(u, PROMPT_AT, prompts), quantile(v, OUTPUT_AT, outputs)))
    return sorted(pairs, key=lambda _: rng.random())


def arrivals(rng: random.Random) -> list[float]:
    """Arrival times in seconds, from 0: Poisson with a slowly drifting rate of mean RATE."""
    normal = NormalDist()
    times = [0.0]
    drift = RATE_SWING * normal.inv_cdf(rng.random())
    while len(times) < REQUESTS:
        gap = -math.log(1 - rng.random()) / (RATE * math.exp(drift))
        keep = math.exp(-gap / SWING_S)
        noise = RATE_SWING * math.sqrt(1 - keep * keep) * normal.inv_cdf(1 - rng.random())
        drift = keep * drift + noise
        times.append(times[-1] + gap)
    return [time * (REQUESTS - 1) / RATE / times[-1] for time in times]


def main() -> None:
    here = Path(__file__).parent / "synthetic_azure_conv.csv"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else here
    rng = random.Random(2023)
    pairs = lengths(rng)
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for time, (prompt, output) in zip(arrivals(rng), pairs, strict=True):
        ticks = round(time * 10**7)
        second = START + datetime.timedelta(seconds=ticks // 10**7)
        rows.append(f"{second}.{ticks % 10**7:07d},{prompt},{output}")
    out.write_text("\n".join(rows) + "\n", newline="\n")


if __name__ == "__main__":
    main()
