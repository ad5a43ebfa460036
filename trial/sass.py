"""python sass.py order|hazards|count CUBIN..: what the main loop of `backward` is made of; whether a register is written (or an accumulator read) while an unfinished HGMMA uses it."""
import re,subprocess,sys,os
from pathlib import Path
from triton.backends import nvidia
B=str(Path(nvidia.__file__).parent/"bin")+"/"
if not os.path.isdir(B):
    import triton; B=os.path.join(os.path.dirname(triton.__file__),"backends","nvidia","bin","")
def lines(cubin, fn="backward"):
    out=subprocess.run([B+"nvdisasm","-c",cubin],capture_output=True,text=True).stdout
    on=False; r=[]
    for l in out.splitlines():
        if re.match(r"\s*\.section\s", l): on = f".text.{fn}" in l
        elif on: r.append(l)
    return r
def order(cubin):
    cnt={}
    def flush():
        if cnt: print("       ["+", ".join(f"{k} x{v}" for k,v in cnt.items())+"]"); cnt.clear()
    for ln,l in enumerate(lines(cubin)):
        m=re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);",l)
        lab=re.match(r"\s*(\.L_x_\d+):",l)
        if lab: flush(); print(f"{ln}: {lab.group(1)}:"); continue
        if not m: continue
        t=m.group(1)
        for pat,name in [(r"HGMMA","hgmma"),(r"MUFU\.EX2","ex2"),(r"F2FP","f2fp"),(r"FFMA","ffma"),(r"FMUL","fmul"),(r"SHFL","shfl"),(r"FADD","fadd"),(r"STSM","stsm"),(r"\bSTS\b|STS\.","sts"),(r"LDSM|LDS","lds"),(r"\bSTL|\bLDL","SPILL"),(r"RED\.|ATOM","red"),(r"R2UR","r2ur"),(r"\bMOV|IMAD\.MOV","mov"),(r"UMOV|UIADD|ULOP|USHF|UIMAD|UPRMT|USEL|ULEA|UISETP","uni"),(r"PRMT|IMAD\.U32|SHL|LOP3|IMAD\.SHL","unpk"),(r"STAS|ST\.","ST")]:
            if re.search(pat,t): cnt[name]=cnt.get(name,0)+1; break
        else:
            if re.search(r"WARPGROUP|BAR\.|SYNCS|UTMA|UBLK|USETMAX|\bBRA\b|UTMAREDG|EXIT|FENCE|DEPBAR|WARPSYNC",t): flush(); print(f"{ln}: {t[:100]}")
            else: cnt["other"]=cnt.get("other",0)+1
    flush()
def loop(cubin):
    L=lines(cubin); lab={}
    for i,l in enumerate(L):
        m=re.match(r'\s*(\.L_x_\d+):',l)
        if m: lab[m.group(1)]=i
    best=None
    for i,l in enumerate(L):
        m=re.search(r'BRA `\((\.L_x_\d+)\)',l)
        if m and m.group(1) in lab and lab[m.group(1)]<i:
            body=L[lab[m.group(1)]:i+1]
            n=sum('HGMMA' in x for x in body)
            if n>=30 and (best is None or len(body)<len(best)): best=body
    return best
def regs(base,n): return set(range(base,base+n))
def hazards(f):
    body=loop(f); seq=[]
    for l in body+body:
        m=re.search(r'/\*[0-9a-f]{4,}\*/\s+(.*?);',l)
        if m: seq.append(m.group(1).strip())
    groups=[]; cur=[]; bad=0; kinds={}
    for n,t in enumerate(seq):
        t0=re.sub(r'^@!?U?P\d+\s+','',t)
        if t0.startswith('HGMMA'):
            m=re.match(r'HGMMA\.64x(\d+)x16\.F32\.BF16(\.[A-Z]+)*\s+R(\d+), (R(\d+)|gdesc\[UR(\d+)\])',t0)
            N=int(m.group(1)); acc=regs(int(m.group(3)),N//2)
            a=regs(int(m.group(5)),4) if m.group(5) else set()
            cur.append((acc,a,t0)); kinds[re.sub(r'R\d+|UR\d+','R',t0)[:80]]=kinds.get(re.sub(r'R\d+|UR\d+','R',t0)[:80],0)+1
            if 'gsb0' in t0: groups.append(cur); cur=[]
            continue
        m=re.match(r'WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)',t0)
        if m:
            left=int(m.group(1)); assert not cur, 'uncommitted'
            groups=groups[len(groups)-left:] if left else []
            continue
        # written registers
        m=re.match(r'([A-Z0-9_.]+)\s+(.*)',t0)
        if not m: continue
        op,args=m.groups(); width=4 if '.128' in op else 2 if ('.64' in op or 'WIDE' in op) else 1
        first=args.split(',')[0].strip()
        acc_all=set().union(*[g[0] for gr in groups+[cur] for g in gr]) if groups or cur else set()
        a_all=set().union(*[g[1] for gr in groups+[cur] for g in gr]) if groups or cur else set()
        store=op.startswith(('ST','RED','SYNCS','BAR','BRA','STAS'))
        if re.fullmatch(r'R\d+',first) and not store:
            w=regs(int(first[1:]),width)
            if w&a_all or w&acc_all: bad+=1; print('  WRITES in flight:',t, 'A' if w&a_all else 'ACC')
        read=set()
        for x in re.findall(r'\bR(\d+)',args if store else args[len(first):]):
            read|=regs(int(x),width if store or op.startswith('ST') else 1)
        if read&acc_all: bad+=1; print('  READS accumulator in flight:',t)
    print(f.split('/')[-1], 'hazards', bad, kinds)
def count(f):
    body=[x for x in loop(f) if re.search(r'/\*[0-9a-f]{4,}\*/\s',x)]; c=lambda p: sum(bool(re.search(p,x)) for x in body)
    print(f.split('/')[-1],'loop',len(body),'HGMMA',c('HGMMA'),'EX2',c('MUFU.EX2'),'R2UR',c('R2UR'),'LDL/STL',c('LDL|STL'),'moves',c(r'\bMOV\b|IMAD.MOV'),'uniform',c(r'\bU[A-Z]+[0-9A-Z.]* '))
if __name__=="__main__":
    for f in sys.argv[2:]: {"order":order,"hazards":hazards,"count":count}[sys.argv[1]](f)
