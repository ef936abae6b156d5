import sys; sys.path.insert(0,'.')
import torch
from dataclasses import replace
from functools import partial
from world import *
from hone.algo import *
from hone.algo import credit, terms
from hone.algo.weight import *
from hone.types import ABSENT
P=RAGGED.policy(1.0); true=RAGGED.loss_gradient(P)
for size in (2,3):
    print(size,'rloo',error(expected_gradient(rloo(),RAGGED,P,size=size),true))
    f=expected_gradient(dr_grpo(),RAGGED,P,size=size); print('dr', error(f*3*size/(size-1),true))
    z=Algorithm(loss=((1.0,terms.policy_gradient),),credit=credit.group_zscore,weigh=row_sum)
    f=expected_gradient(z,RAGGED,P,size=size); print('z',cosine(f,true), f.norm()/true.norm())
    for name,a in dict(grpo=grpo(beta=0.),dapo=dapo(),gspo=gspo(),cispo=cispo()).items():
        f=expected_gradient(a,RAGGED,P,size=size); print(name,cosine(f,true), f.norm()/true.norm())
    tm=replace(rloo(),weigh=token_mean)
    f=expected_gradient(tm,RAGGED,P,size=size); print('token',cosine(f,true), f.norm()/true.norm())
L=(RAGGED.chance(P)*RAGGED.batch.mask.sum(-1)).sum().item(); print('len',L, 1/L)
for size in (1,2,3,4):
    tm=replace(reinforce(),weigh=token_mean)
    f=expected_gradient(tm,RAGGED,P,size=size); print('token',size,cosine(f,true), error(f*L,true))
rm=replace(reinforce(),weigh=row_mean)
f=expected_gradient(rm,RAGGED,P); print('row',cosine(f,true))
binary=replace(RAGGED,batch=replace(RAGGED.batch,reward=(RAGGED.batch.reward>0.4).double(),step_reward=ABSENT))
p=(binary.chance(P)*binary.batch.reward).sum().item(); print('p',p)
tb=binary.loss_gradient(P)
for size in (2,3,4):
    z=Algorithm(loss=((1.0,terms.policy_gradient),),credit=partial(credit.group_zscore,eps=0.),weigh=row_sum)
    f=expected_gradient(z,binary,P,size=size); print(cosine(f,tb), (f.norm()/tb.norm()).item())
SP=SQUARE.policy(1.0); ts=SQUARE.loss_gradient(SP)
V=SQUARE.at(SQUARE.value(SP))
for size in (1,2,3):
  for name,a in dict(ppo=ppo(),rpp=reinforce_pp(beta=0.),rppb=reinforce_pp_baseline(beta=0.)).items():
    f=expected_gradient(a,SQUARE,SP,size=size,**({'old_value':V} if name=='ppo' else {}))
    print(size,name,cosine(f,ts),(f.norm()/ts.norm()).item())
