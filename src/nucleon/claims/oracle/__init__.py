"""The paper a second time, from its formulas alone: what every claim holds the library to.

NumPy in float64 with exact decompositions, sums over whole histories where the library keeps
running ones, and one textbook solver. Nothing here imports the library, so nothing it judges can be
wrong in the same way: an import rule keeps it so. It is slow, and made for a few rounds of small
matrices.

algebra: powers, norms, the solver · learners: actions from the gradients so far · bounds: Theorems
3.2, 4.1, 4.2, C.1, Tables 1 and 2 · unknown: Remark B.1 · scalar: 1×1 in closed form · lemma: Lemma
3.1 · mixtures: Proposition 3.3 · gradient_sums: Lemmas C.2 to C.5 · wishart: Lemmas E.1 to E.3 ·
deviations: k samples with probability 1−δ · conversion: Muon, Pion, Leon, Appendix G · costs:
Appendix F.

A history of gradients is an array (T, …, m, n); the dimensions between are games side by side.
"""
