def plan_html(plan): return ''
