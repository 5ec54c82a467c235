"""Scoring of batches: a model sees whole columns, and what scores high is passed on.

Each subtask loads the model once, in `open`: a model need not travel. It looks at each row alone, so it does not matter where a
batch ends, and after a failure the same rows get the same scores. There is no state, no event time, no exchange between workers.

    python examples/cookbook/score_batches.py
"""

import numpy as np
import pyarrow as pa

import holdfast as hf

SUSPICIOUS = 1.5
SCORED = pa.schema([("id", pa.int64()), ("cents", pa.int64()), ("score", pa.float64())])


def load_model():
    """A scorecard: points for the amount by step, for the hour, and for a foreign country. Of a file, in earnest."""
    return {
        "steps_cents": np.array([5_000, 20_000, 60_000]),
        "amount": np.array([0.0, 0.25, 0.5, 1.0]),
        "hour": np.array([0.75] * 6 + [0.125] * 18),
        "foreign": 0.5,
    }


class Scorer(hf.RichFunction):
    """Gives a batch its scores, and keeps the suspicious rows."""

    def open(self, ctx):
        self.model = load_model()

    def __call__(self, batch):
        model = self.model
        amount = model["amount"][np.searchsorted(model["steps_cents"], batch.column("cents").to_numpy(), side="right")]
        hour = model["hour"][batch.column("hour").to_numpy()]
        foreign = np.array([country != "NL" for country in batch.column("country").to_pylist()]) * model["foreign"]
        scores = amount + hour + foreign
        scored = pa.RecordBatch.from_arrays([batch.column("id"), batch.column("cents"), pa.array(scores)], schema=SCORED)
        return scored.filter(pa.array(scores >= SUSPICIOUS))


def pipeline(payments):
    """The suspicious ones of a stream of payments."""
    return payments.map_batches(Scorer(), returns=SCORED).uid("score")


SQL = """
    SELECT id, cents,
        CASE WHEN cents < 5000 THEN 0.0::DOUBLE WHEN cents < 20000 THEN 0.25 WHEN cents < 60000 THEN 0.5 ELSE 1.0 END
            + CASE WHEN hour < 6 THEN 0.75::DOUBLE ELSE 0.125 END + CASE WHEN country <> 'NL' THEN 0.5::DOUBLE ELSE 0.0 END AS score
    FROM payments WHERE score >= 1.5
"""


def tables():
    """3,000 payments."""
    random = np.random.default_rng(6)
    rows = {
        "id": pa.array(np.arange(3_000)),
        "cents": pa.array(random.integers(100, 90_000, 3_000)),
        "hour": pa.array(random.integers(0, 24, 3_000)),
        "country": pa.array(random.choice(["NL", "BE", "DE"], 3_000).tolist()),
    }
    return {"payments": pa.table(rows)}


if __name__ == "__main__":
    from running import main

    main("score-batches", pipeline, tables(), SQL)
