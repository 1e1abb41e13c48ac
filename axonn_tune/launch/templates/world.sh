#!/usr/bin/env bash
{% for line in job.about[:-1] %}
{{ line | comment }}
{% endfor %}
{% if job.ranks_per_node > 1 %}
{{ ("Ranks of a node are consecutive, 0 to " ~ (job.ranks_per_node - 1) ~ " on the first: neighbours along " ~ job.inner ~ " are nearest." ~ fixed) | comment }}
{% endif %}
{{ ("Predicted: " ~ predicted ~ ".") | comment }}
{{ job.about[-1] | comment }}
{% block directives %}
{% endblock %}
set -euo pipefail

# nodes · ranks_per_node = {{ job.factors | join(" · ") }}: {{ job.nodes }} · {{ job.ranks_per_node }} = {{ job.factors.values() | join(" · ") }} = {{ job.world }}
nodes={{ job.nodes }}
ranks_per_node={{ job.ranks_per_node }}
world=$(({{ job.factors.values() | join(" * ") }}))
if ((nodes * ranks_per_node != world)); then
  echo "$nodes nodes of $ranks_per_node ranks are $((nodes * ranks_per_node)) ranks, but the grid has $world" >&2
  exit 2
fi

{% block checks %}
{% endblock %}
{% for line in job.settings %}
{{ line }}
{% endfor %}

# Load modules and activate your Python environment here, unless they are already.
{% for line in job.variables %}
{{ line }}
{% endfor %}
{% if job.checks %}

# What must be there before a rank starts; each ends with one line where it is not.
stop() { echo "$1" >&2; exit 2; }
{% block inside %}
inside() { "$@"; }
{% endblock %}
{%   for line in job.checks %}
{{ line }}
{%   endfor %}
{% endif %}
{% block start %}
{% endblock %}
