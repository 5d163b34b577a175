import os; os.environ['XLA_FLAGS']='--xla_force_host_platform_device_count=8'
import jax, jax.numpy as jnp, time, numpy as np
from jax import lax
from functools import partial
from jax.sharding import PartitionSpec as PS, Mesh, AxisType
mesh=Mesh(np.array(jax.devices()),('x',),axis_types=(AxisType.Auto,))
def bench(f,x,n=20):
    f(x).block_until_ready(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(x).block_until_ready(); ts.append(time.perf_counter()-t)
    return np.median(ts)
K=10
ops={'ar':lambda v:lax.psum(v,'x')*0.1,'ag_rs':lambda v:lax.all_gather(lax.psum_scatter(v,'x',tiled=True),'x',tiled=True)*0.1,'a2a':lambda v:lax.all_to_all(v.reshape(8,-1),'x',0,0,tiled=True).reshape(-1)*1.1,'mul':lambda v:jnp.sin(v)*1.1}
for name,op in ops.items():
    for n in (1024,1<<14,1<<17,1<<20):
        @jax.jit
        @partial(jax.shard_map,mesh=mesh,in_specs=PS(),out_specs=PS(),check_vma=False)
        def f(v):
            for _ in range(K): v=op(v)
            return v
        t=bench(f,jnp.ones(n,jnp.float32))/K
        print(name,n*4,'bytes',round(t*1e6,1),'us',round(n*4/t/1e9,3),'GB/s')
@jax.jit
@partial(jax.shard_map,mesh=mesh,in_specs=PS('x'),out_specs=PS('x'),check_vma=False)
def g(v):
    for _ in range(K): v=v@v*0.001
    return v
for n in (128,512):
    t=bench(g,jnp.ones((8*n,n)),10)/K; print('mm',n,t*1e6,'us',2*n**3/t/1e9,'GFLOP/s per dev')
