"""What a fit costs one worker, by the number of workers: messages and their KB, requests to the store, and calls of fastdist's own Python functions.

    python benchmarks/scale.py [--workers 2 8 1024 16384] [--only ddp zero1 zero2 fsdp]

No other worker is there: all are taken to be like this one, rank 0, of whom most is asked (tests/support/echo.py). A small model with batch norm, of 6 parameters,
and Adam; a batch has a sample for each worker. A step is the third of the second epoch. The first context looks at the data as well. KB is what this worker hands
to collectives; where rows are padded, to as many for each worker, the parameters are so few here that it is all padding. Some 30 seconds."""
import warnings

from shared import parser

warnings.filterwarnings('ignore')


def main():
    from test_messages import STRATEGIES, costs
    from forked import started
    p = parser(__doc__)
    p.add_argument('--workers', type=int, nargs='+', default=[2, 8, 1024, 16384])
    p.add_argument('--only', nargs='+', default=list(STRATEGIES), choices=list(STRATEGIES))
    a = p.parse_args()
    found = dict(zip(a.workers, started(costs, [{'SIZE': str(o)} for o in a.workers], timeout=600)))
    print(f"| strategy | | {' | '.join(f'{o:,} workers' for o in a.workers)} |\n|---|---|{'---|'*len(a.workers)}")
    for strategy in a.only:
        for phase in found[a.workers[0]][strategy]:
            cells = [f'{len(o.sent)}, {sum(n for _, n in o.sent)/1e3:.1f} KB, {sum(o.asked.values())}, {sum(o.calls.values()):,}' for o in (found[n][strategy][phase] for n in a.workers)]
            print(f"| {strategy} | {phase} | {' | '.join(cells)} |")


if __name__ == '__main__': main()
