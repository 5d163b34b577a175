"""All constants of the search: what each is, in which unit, and why it is as it is.

Seconds are of counted work (effort.py). What half and double of each does is said beside it, where a step of
the classifier or the U-Net of benchmarks/search.py changes by half a percent, without a limit on memory or at
0.6 of what the plan needs, or the work of all by 5 % (`--constants all`, 2026-12-01). All that is shorter is
the U-Net at 0.6: its step is 1,054 us, there are plans of 960, and any change may meet one. Many constants
serve other programs: networks that are not written down, and many equal layers.
"""

# What work counts, as measured on a core of 2023 that does nothing else.

SWEPT_CELL_SECONDS = 1e-9
"""A sweep of TRW-S, for each cell of a table, at each of its two ends. Half: steps up to 8.9 % shorter."""
INDEXED_CELL_SECONDS = 2.5e-10
"""The same over indexed tables, of which most rows lower nothing."""
MOVED_CELL_SECONDS = 2e-9
"""A move, for each cell of the tables of a node. Half: steps up to 3.0 % shorter."""
ELIMINATED_CELL_SECONDS = 2e-9
"""An elimination, for each cell of its buckets."""
PLANNED_EDGE_SECONDS = 2e-5
"""To plan an elimination, for each node and each edge."""
REDUCED_EDGE_SECONDS = 3.5e-5
"""To reduce a network, for each node and each edge. With twice as much a ResNet has no time for parallelisms.
Double: steps up to 2.6 % longer or 3.0 % shorter."""
LOOKED_STEP_SECONDS = 7e-5
"""To look at a plan, for each step of its program. Half: steps up to 2.6 % longer."""

# How much work there is, per unit of `Options(effort=)`.

SOLVE_SECONDS = 10.0
"""For the cheapest plan and its bound. Few programs take a tenth of it."""
EXPLORE_SECONDS = 2.0
"""For plans around the cheapest: about as long as a large program takes to be traced and lowered. Half: work
15 % less. Double: work 12 % more."""
LIMITED_SECONDS = 6.0
"""The same under a limit on memory, where a look counts more."""
STARTS_SECONDS = 3.0
"""Under a limit: to find where to begin."""
SEARCH_SECONDS = 4.0
"""Under a limit: for the first search of the cheapest that fits. Twice as much for a network of
`WRITTEN_CELLS`, as for each of these. Half: work 16 % less. Double: steps up to 2.4 % shorter, work 30 %
more."""
TRY_SECONDS = 2.0
"""For a search that follows, at the smallest peak, or a solution at prices. Half: steps up to 14.6 % longer,
work 49 % more. Double: work 31 % more."""
NEAR_SECONDS = 1.0
"""For a shorter step near a plan in which a tensor is held."""
MOST_TURNS = 80
"""Plans that are looked at beside the cheapest, at the most: from there on better plans are rare. Half: the
net of flax is 5 % longer, work 12 % less."""
NEAR_TURNS = 6
"""Plans that are looked at near one in which a tensor is held."""
PART_SHARE = 0.3
"""Of what is left of an effort, for one part of a search, such as a solution of a smaller problem. Half:
steps up to 3.0 % shorter."""

# What counts as the same.

NOISE = 1e-10
"""Of the cost: what gains less is rounding."""
GAINED = 1e-6
"""Of the cost: a round of moves that gains less has gained nothing."""
PROGRESS = 1e-4
"""Of the bound or the cost: a round that changes them by less has stalled."""
PROVEN = 1e-5
"""Of the cost: a plan so near to its bound is the cheapest, and a search without a limit ends."""
CLOSE = 0.005
"""Of the cost or the memory: a search ends so near to its bound; so near peaks are the same."""
SAME_STEP = 5e-4
"""Of a step: plans nearer to each other are ranked by their work, since the clock is no more exact."""

# The solver.

RESULT_CELLS = 1e8
"""Cells that a reduction goes through, or the states that are left may have, at the most: a gigabyte."""
ELIMINATED_CELLS = 1e8
"""Cells of the buckets of a connected part that is eliminated over at once: half a second."""
COMPARED_CELLS = 1 << 21
"""Comparisons of all states of a node, or combinations of all states of a network, that are gone through.
Half: steps up to 2.4 % shorter."""
SMALL_TABLE_CELLS = 4096
"""A node between two others is reduced where their new table is no larger,"""
TABLE_GROWTH = 4
"""or has at most so many times the cells of the old ones."""
ROUND_SWEEPS = 40
"""Pairs of sweeps, or steps of prices, between two looks at what they bring. Half: steps up to 3.0 %
shorter."""
SHRUNK = 0.3
"""A search goes on with the states that are left when this part of them is gone."""

# Networks that are not written down, or folded.

DENSE_CELLS = 4e6
"""Networks up to this size are written down at once: there sweeps over indexed tables gain nothing."""
WRITTEN_CELLS = 2e7
"""Networks, and tables of the states below a level, are written down up to this size: 160 MB. Half: steps up
to 4.6 % shorter, work 8 % more. Double: steps up to 2.8 % longer, work 20 % less."""
LEVELS = (0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4)
"""Above the bound, relative to it: the levels below which states may stay."""
LEVEL_GROWTH = 4.0
"""Of its height above the bound, where no plan is below a level."""
ALIKE_HOPS = 4
"""How far nodes look alike that are one: so far from the end of a stack a layer has its own choice."""
ALIKE_PART = 0.6
"""Of the nodes: where at most these are left a network is folded."""

# Moves of forests.

MOVES = 200
"""In a round. Double: steps up to 1.4 % shorter, work 16 % less."""
MOVE_ROUNDS = 9
"""From one assignment, at the most: three for each discount. Half: steps up to 1.4 % longer. Double: steps up
to 8.9 % shorter."""
FOREST_NODES = 4096
"""Of the forest of a move, at the most. Half: steps up to 2.6 % longer or 3.9 % shorter. Double: steps up to
2.6 % longer or 3.9 % shorter."""
DISCOUNTS = (1.0, 0.5, 0.0)
"""Parts of what bytes cost, in turn: at full prices nobody takes the room that is left for what is little
worth. Double: steps up to 2.4 % shorter."""
LEAST_PART = 0.01
"""Of a table counts at least this: of plans that hide all moves the one is found that sends least."""

# Prices of bytes.

PRICE_PATIENCE = 8
"""Steps without half of the rise hoped for, before less is hoped for. Half: steps up to 3.0 % shorter.
Double: steps up to 2.4 % shorter."""
LATEST_USE = 0.2
"""What the latest use counts beside all that was seen: decoded states jump, their average does not. Half:
steps up to 3.9 % shorter. Double: steps up to 1.4 % longer."""
FIRST_HOPE = 0.05
"""Of the bound: the rise hoped for at first. Double: steps up to 3.9 % shorter."""
HOPE_GROWTH = 0.15
"""By what part hope grows where it came true. Half: steps up to 4.0 % shorter."""
LEAST_HOPE = 1e-5
"""Of the bound: below this hope starts again. Half: steps up to 8.9 % shorter. Double: steps up to 4.0 %
shorter."""
MOST_HOPE = 1e3
"""Of the bound: the most hope while nothing is known that fits."""
HELD_STEPS = 10
"""Steps between two looks at prices that are held, or at the weights of a peak."""

# The search under a limit.

STALLED_ROUNDS = 5
"""Rounds without progress before it ends. Double: steps up to 3.0 % shorter."""
KICKS = 3
"""Tries in a round to leave the best assignment and to come back to a better one. Half: steps up to 3.0 %
shorter. Double: steps up to 8.9 % shorter."""
TOGETHER = 8
"""Assignments that are brought together, those that cost least at the prices of now (half: steps up to 3.4 %
longer; double: steps up to 8.9 % shorter),"""
KEPT = 32
"""of so many that are kept to choose from,"""
APART = 0.005
"""which differ in more than this part of the nodes (double: steps up to 8.9 % shorter);"""
FEW_STATES = 4
"""with so many states of each node beside theirs that cost least by the bound (half: steps up to 8.9 %
shorter; double: steps up to 2.4 % shorter),"""
RISEN = 0.25
"""where the bound has risen by more than this part of the gap, and others may cost least."""
COMBINED_GAP = 1e-3
"""Of the cost: the search over these ends so near to its bound."""
PEAK_ROUNDS = 60
"""For the smallest peak, at the most."""
PEAK_SHARPNESS = 8.0
"""How strongly times near the peak are weighted at first: e to this power against empty ones."""
PRICES_TRIED = 4
"""To begin with: prices at which the fastest plan's ops are solved for (half: steps up to 2.4 % shorter),"""
MOST_PRICES = 7
"""or so many while no answer keeps the limit (half: steps up to 2.4 % shorter);"""
FIRST_PRICE = 0.3
"""the first of which makes the bytes that are too many cost this part of the plan (half: steps up to 1.3 %
shorter; double: steps up to 1.3 % shorter),"""
PRICE_FACTOR = 4.0
"""and from one to the next, until one answer keeps the limit."""
SMALL_PART = 1e-3
"""Of the limit: copies of smaller tensors are not counted, since each takes a variable."""
APART_PART = 0.02
"""Of the program: uses of a value are near each other while no more is between them. Half: steps up to 2.4 %
shorter. Double: steps up to 3.0 % shorter."""
NEAR_PART = 0.01
"""Of the program: what is needed for no longer need not be made again; around a peak bytes are corrected.
Half: steps up to 2.4 % shorter. Double: steps up to 4.1 % shorter, work 17 % less."""
CORRECTED_TRIES = 8
"""How often a search is told what the evaluator finds beside what was counted, around the peak."""
MARGIN = 0.002
"""Of what the next try might use, this part is left free. Half: steps up to 3.9 % shorter. Double: steps up
to 4.0 % shorter."""
FREE_PART = 0.02
"""Of the limit: a plan that leaves this much free may be followed by one that counts more. Double: steps up
to 3.0 % shorter, work 16 % less."""
MOST_STEP = 0.15
"""Of the limit: what counts so much more needs too much, since counts are that exact."""

# What is explored.

PERIOD = 4
"""Of so many turns the second begins a parallelism, the third goes on from it, and the last looks near the
best plan; the first goes on with the chain that promises most."""
PATIENCE = 0.03
"""A chain counts as so much longer for each plan that was looked at in it: others have their turn. A third: a
diffusion transformer 3.3 % longer, a state-space model 1.6 %, a mixture of experts 1.0 % shorter. Double:
steps up to 2.6 % longer."""
SOLVED_PART = 0.6
"""Of the work, for solutions of whole problems; plans near others take the rest. Half: steps up to 8.9 %
shorter."""
DAMPING = 0.5
"""How much of the shares stays from plan to plan: without, two plans that each expose what the other hides
would alternate."""
UNSEEN_SHARE = 0.3
"""What a collective counts where the plan sends nothing in the same phase of the step. Half: steps up to 2.8
% longer or 1.2 % shorter, work 18 % less. Double: steps up to 3.7 % longer or 4.0 % shorter."""
TIE = 0.035
"""Shaken shares are more or less by so much at the most, to find plans that cost about the same."""
CROSSOVER_PLANS = 40
"""Plans whose parts are looked at in the best one."""
TURNS_PART = 0.75
"""Of each round of turns; the rest of them puts such parts into the best plan."""

# Programs that are so small that all their plans are looked at, under a limit.

COMBINATIONS = 1 << 16
"""Of states, up to which all are written down."""
LESS_ROUNDS, LESS_PRICE = 6, 10.0
"""How often a parallelism of a small program is planned before a refusal, and what bytes cost more when each
peak is: all that there is room for costs so many plans. With a tenth of that one is refused falsely."""
SENT_PART = 0.9
"""Of what collectives take by the search, what they take at least: some are sent as one."""
PROGRAMS_TRIED = 1000, 10_000
"""Of these, those that are made: where a plan is known that fits, and before a refusal; and as many again in
which ops run again. The first take three seconds; with 300 one of 50 plans is up to a fifth longer."""
RECOMPUTATIONS = 64
"""Choices of what runs again; of more none is looked at."""

# What else a tensor could lie as.

HELD_SHARES = 1.5
"""Alternatives that may take their whole share of the time, for each one that is wanted: most take less."""

# Before and after a search.

CASTS_SHARE = 0.05
"""Of the memory of all devices, what may be kept of weights that are cast once for all micro-batches."""
BOUND_SECONDS = 10.0
"""Of work, for a bound that holds however versions are made."""
