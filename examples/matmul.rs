//! A product by the shared library of `portmm bundle --c`.
//!
//!     portmm bundle layers.bundle --shapes shapes.txt --c lib
//!     rustc --edition 2021 examples/matmul.rs -L lib -o matmul && LD_LIBRARY_PATH=lib ./matmul 64 256 128
use std::ffi::{c_char, c_int, c_long, c_void, CStr};

#[link(name = "portmm")]
extern "C" {
    fn portmm_machine() -> *const c_char;
    fn portmm_matmul(
        types: *const c_char, m: c_long, n: c_long, k: c_long, a: *const c_void, a_m: c_long, a_k: c_long,
        b: *const c_void, b_k: c_long, b_n: c_long, c: *mut c_void, c_m: c_long,
    ) -> c_int;
}

fn main() {
    let sizes: Vec<usize> = std::env::args().skip(1).map(|x| x.parse().expect("a size")).collect();
    let (m, n, k) = if sizes.len() == 3 { (sizes[0], sizes[1], sizes[2]) } else { (64, 256, 128) };
    let a: Vec<f32> = (0..m * k).map(|i| (i * 7 % 13) as f32 - 6.0).collect();
    let b: Vec<f32> = (0..k * n).map(|i| (i * 5 % 11) as f32 - 5.0).collect();
    let mut c = vec![f32::NAN; m * n];
    let (lm, ln, lk) = (m as c_long, n as c_long, k as c_long);
    let status = unsafe {
        portmm_matmul(
            c"f32".as_ptr(), lm, ln, lk, a.as_ptr().cast(), lk, 1, b.as_ptr().cast(), ln, 1, c.as_mut_ptr().cast(), ln,
        )
    };
    let machine = unsafe { CStr::from_ptr(portmm_machine()) }.to_string_lossy().into_owned();
    assert_eq!(status, 0, "on {machine}");
    let errors = (0..m * n)
        .filter(|&at| {
            let sum: f64 = (0..k).map(|l| f64::from(a[at / n * k + l]) * f64::from(b[l * n + at % n])).sum();
            f64::from(c[at]) != sum
        })
        .count();
    println!("{m} x {n} x {k} by kernels of {machine}: {errors} errors");
    std::process::exit(i32::from(errors != 0));
}
