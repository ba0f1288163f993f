use trainable_candle_nn::optim::adam8bit::*;
fn main(){
 let n=16*1024*1024; 
 let mut r=1u32; let mut rnd=||{r^=r<<13;r^=r>>17;r^=r<<5; (r as f32/4294967296.0-0.5)*4.0};
 let mut p:Vec<f32>=(0..n).map(|_|rnd()).collect(); let g:Vec<f32>=(0..n).map(|_|rnd()).collect();
 let (mut c1,mut c2)=(vec![0u8;n],vec![0u8;n]); let (mut a1,mut a2)=(vec![0f32;n/256],vec![0f32;n/256]);
 let mut ts=vec![];
 for step in 1..=12u64 {
  let at=Coefficients::new(&Adam8bitConfig{lr:1e-3,betas:(0.9,0.999),eps:1e-8,weight_decay:0.01,min_8bit_size:4096},step);
  let t=std::time::Instant::now();
  let mut parts:Vec<_>=p.chunks_mut(16384).zip(g.chunks(16384)).zip(c1.chunks_mut(16384).zip(a1.chunks_mut(64))).zip(c2.chunks_mut(16384).zip(a2.chunks_mut(64))).collect();
  trainable_candle_core::cpu::pool::par_chunks_mut(&mut parts,1,|_,x|{ let (((p,g),s1),s2)=&mut x[0]; update_blockwise(at,p,g,Codes{codes:s1.0,absmax:s1.1},Codes{codes:s2.0,absmax:s2.1}) });
  ts.push(t.elapsed().as_secs_f64()*1e3);
 }
 println!("{ts:.1?} {}", p[5]);
}
