"""Write docs/equivalence.md: for every line and case of the matrix, its difference from one process.

Usage: python tests/equivalence/table.py, as root, since two nodes are two network namespaces.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from matrix import ALONE, CASES, GLOBAL_BATCH, LINES, compare, run

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"
TEXT = f"""# The same numbers: every strategy against one process

The optimizer step does not depend on the strategy, the number of processes or the accumulation: only the order of
floating-point additions differs. The table below is measured: each cell is the largest difference of any parameter, on
any rank, from one process after six optimizer steps on the same shuffled global batches of {GLOBAL_BATCH} samples; a
dash marks a case that is not run. Metrics of training, validation and test, `global_step` and `samples_seen` are
compared as well. [The test](../tests/equivalence/test_matrix.py) fails for differences above 1e-12 in float64, and in
float32 above 1e-6 with SGD and 1e-4 with AdamW, which amplifies the noise of small gradients. A strategy is registered
only if it is in this table.

- *even*: three whole global batches per epoch; *uneven*: 13 samples are left over; *one left*: one sample is left over,
  so that some ranks have none.
- *accumulate 2*: the global batch is split into two micro-batches per rank; *cut in 5s*: `global_batch_size` with a
  batch size that does not divide it.
- *clip*: by the norm of the gradients of all ranks; *units*: the step returns `Loss(total, count)` with different
  counts.
- *local_sgd* takes different steps by design. It is compared in its warm-up, and with averaging at every step, which
  is the same for SGD without clipping.
- SGD has momentum and weight decay. The module has a frozen layer, tied weights and a buffer. In the columns with `tp`
  (except "dense"), it is a language model of two attention blocks, with a tied embedding, frozen layers and a buffer.
  In the columns with `pp`, it has four blocks, and there are twice as many micro-batches.

| case | {{lines}} |
|---|{{rule}}|
{{rows}}

Measured with torch {torch.__version__.split("+")[0]} on the CPU. To measure again:

```bash
python tests/equivalence/table.py
```
"""


def main():
    """Run the matrix and write the page."""
    expected = {network: run(line) for network, line in ALONE.items()}
    lines = LINES[1:]
    columns = [column(run(line), expected[line.network]) for line in lines]
    rows = [" | ".join([f"| {case.title}", *row]) + " |" for case, *row in zip(CASES, *columns, strict=True)]
    rule = "---|" * (len(lines) - 1) + "---"
    PAGE.write_text(TEXT.format(lines=" | ".join(line.title for line in lines), rule=rule, rows="\n".join(rows)))


def column(ends, expected):
    """Return the table cells of a line."""
    return [cell(ends.get(case), expected[case][0] if case in ends else None) for case in CASES]


def cell(ends, expected):
    """Return the text of a table cell; a dash if the line does not have the case."""
    if ends is None:
        return "-"
    return f"{max(compare(end, expected).state for end in ends):.0e}".replace("0e+00", "0")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
