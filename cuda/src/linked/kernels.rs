//! The kernels: a Rust module for each file of `kernels/`, with the file's compiled code and a structure of the
//! arguments of each kernel.
//!
//! The build script generates these Rust modules from the kernels' signatures in CUDA. So a launch in Rust does not compile if an argument
//! is missing or has another name or type. The element types of pointers are checked when the kernel is launched.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::structs::{self, Address};

/// The compiled code of one file of kernels, for every architecture that the file was compiled for.
#[derive(Debug)]
pub struct Module {
    /// The file's name without its ending.
    pub name: &'static str,
    /// The code that the driver loads. Empty if the file has kernels only for architectures that the build leaves out.
    pub image: &'static [u8],
}

/// The type of the elements that a pointer points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as dtypes are")]
pub enum Element {
    /// Structures, or elements of a type that another argument selects. Null pointers have this type, too.
    Any,
    U8,
    U16,
    U32,
    U64,
    I16,
    I32,
    I64,
    F16,
    BF16,
    F32,
    F64,
}

impl Element {
    /// Whether a kernel whose parameter has the element type `other` can take a pointer to these elements: the types are equal, or one of
    /// them is `Any`.
    #[must_use]
    pub fn fits(self, other: Self) -> bool {
        self == other || self == Self::Any || other == Self::Any
    }

    /// The unsigned integer type with `size` bytes, for kernels that only copy elements; `Any` for other sizes.
    #[must_use]
    pub const fn of_bytes(size: usize) -> Self {
        match size {
            1 => Self::U8,
            2 => Self::U16,
            4 => Self::U32,
            8 => Self::U64,
            _ => Self::Any,
        }
    }
}

macro_rules! pointers {
    ($($(#[$attribute:meta])* $name:ident;)*) => {$(
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            /// The address.
            pub address: Address,
            /// The type of the elements at the address.
            pub element: Element,
        }

        impl $name {
            /// A null pointer, for optional arguments.
            pub const NULL: Self = Self { address: 0, element: Element::Any };

            /// A pointer to elements of type `element` at `address`.
            #[must_use]
            pub const fn new(address: Address, element: Element) -> Self {
                Self { address, element }
            }

            /// The pointer to the elements that begin `bytes` bytes after this address.
            #[must_use]
            pub const fn offset_by(self, bytes: usize) -> Self {
                Self { address: self.address + bytes as Address, ..self }
            }
        }
    )*};
}

pointers! {
    /// A pointer to memory that a kernel only reads.
    Const;
    /// A pointer to memory that a kernel writes, and perhaps reads.
    Mut;
}

/// A kernel that takes the arguments `A`, in variants for dtypes.
#[derive(Debug)]
pub struct Kernel<A> {
    /// The module of the kernel's file.
    pub module: &'static Module,
    /// The kernel's name, without the dtypes.
    pub name: &'static str,
    /// The variants of the kernel.
    pub variants: &'static [Variant],
    /// No data: it ties the kernel to the type of its arguments.
    takes: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    const fn new(module: &'static Module, name: &'static str, variants: &'static [Variant]) -> Self {
        Self { module, name, variants, takes: PhantomData }
    }
}

/// A kernel's variant for one dtype, or for one combination of dtypes.
#[derive(Debug)]
pub struct Variant {
    /// The dtypes; joined by underscores, they are the suffix of the variant's name.
    pub dtypes: &'static [&'static str],
    /// The names of the pointers among its parameters, and their element types.
    pub pointers: &'static [(&'static str, Element)],
}

/// The arguments of a kernel.
///
/// # Safety
/// [`lend`](Self::lend) passes addresses of values that have the order and types of the parameters of each of
/// [`KERNELS`](Self::KERNELS).
pub unsafe trait Arguments: Sized + 'static {
    /// The kernels that take these arguments.
    const KERNELS: &'static [&'static Kernel<Self>];

    /// Call `to` with an array of the addresses of the arguments, as `cuLaunchKernel` takes it, and the element types of the pointers among
    /// the arguments.
    fn lend<R>(&self, to: impl FnOnce(&mut [*mut c_void], &[Element]) -> R) -> R;
}

/// The address of an argument, as a pointer to mutable memory, which the driver's signature requires. The driver only reads the argument.
/// The generated code calls this function.
const fn place<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
