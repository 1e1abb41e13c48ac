{% extends "world.sh" %}
{% block start %}

{% if job.accelerate %}
{%   if job.nodes == 1 %}
# One node.
{%   else %}
# Run this script on each of the {{ job.nodes }} nodes, with HEAD_NODE the name of the first.
{%   endif %}
exec accelerate launch \
{%   for option in job.accelerate %}
  {{ option }} \
{%   endfor %}
  --num_machines "$nodes" \
  --num_processes "$world" \
{%   if job.nodes == 1 %}
  --machine_rank 0 \
  --main_process_ip localhost \
{%   else %}
  --machine_rank "${NODE_RANK:?set it to 0 on the first node, 1 on the next, and so on}" \
  --main_process_ip "${HEAD_NODE:?set it to the name of the first node, the same on all}" \
{%   endif %}
  --main_process_port "${HEAD_PORT:-29400}" \
  {{ job.program }}
{% else %}
{%   if job.nodes == 1 %}
# One node: any free port will do.
rendezvous=localhost:0
{%   else %}
# Run this script on each of the {{ job.nodes }} nodes, with HEAD_NODE the name of the same one on all.
# torchrun decides which of them has the first ranks.
rendezvous="${HEAD_NODE:?set it to the name of one of the nodes, the same on all}:${HEAD_PORT:-29400}"
{%   endif %}

{%   if nccl %}
# Each rank runs on the cores next to its GPU; torch has the option from 2.9 on.
binding=
if [[ $(torchrun --help) == *--numa-binding* ]]; then
  binding=node
fi

{%   endif %}
# The terminal shows the first rank of a node; logs/ holds what every rank prints.
exec torchrun \
  --nnodes "$nodes" \
  --nproc-per-node "$ranks_per_node" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$rendezvous" \
  --rdzv-id {{ job.name | quote }} \
  --local-ranks-filter 0 \
  --role rank \
  --tee 3 \
  --log-dir "$folder/logs" \
{%   if nccl %}
  ${binding:+--numa-binding $binding} \
{%   endif %}
  {{ job.program }}
{% endif %}
{% endblock %}
