"""Train a small attention layer on packed documents, with a learned relative bias, on whatever device there is.

python examples/packed_documents.py
"""

import torch

import tilewise as tw
from tilewise import masks, scores

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

heads, head_dim, reach = 4, 32, 64
lengths = [300, 150, 574]  # three documents in one row of 1024 tokens
tokens = sum(lengths)

project = torch.nn.Linear(heads * head_dim, 3 * heads * head_dim, device=device)
table = torch.nn.Parameter(torch.zeros(heads, 2 * reach + 1, device=device))
optimizer = torch.optim.Adam([*project.parameters(), table], lr=3e-3)

mask = masks.document(lengths=lengths) & masks.causal
print(tw.tile_map(mask, q_len=tokens, kv_len=tokens))

# The task: each token must output the token five places before it in its own document.
x = torch.randn(1, tokens, heads * head_dim, device=device)
ids = masks.ids_of_lengths(lengths).to(device)
shifted = x.roll(5, dims=1)
valid = (ids == ids.roll(5)) & (torch.arange(tokens, device=device) >= 5)

for step in range(60):
    query, key, value = project(x).chunk(3, dim=-1)
    out = tw.attention(query, key, value, heads=heads, mask=mask, score=scores.relative_bias(table))
    loss = (out - shifted)[:, valid].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == 59:
        print(f"step {step:3d}  loss {loss.item():.4f}")

print("\nthe learned bias prefers a distance of", int(table.detach().mean(0).argmax()) - reach)
print(tw.explain(query, key, value, heads=heads, mask=mask, score=scores.relative_bias(table)))
