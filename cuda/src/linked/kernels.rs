//! The kernels: a module for each file of `kernels/`, with the compiled code and, for each kernel, a structure of its arguments.
//!
//! The build script generates the modules from the kernels' signatures in CUDA, so that a launch does not compile if an argument is
//! missing, swapped or of another type.

use std::ffi::c_void;
use std::marker::PhantomData;

use crate::structs::{self, Address};

/// The machine code of one file of kernels, for every architecture that it was built for.
#[derive(Debug)]
pub struct Module {
    /// The file's name without its ending.
    pub name: &'static str,
    /// The code that the driver loads. Empty if the file is for an architecture that the build leaves out.
    pub image: &'static [u8],
}

/// The element kind of a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as dtypes are")]
pub enum Element {
    /// Structures, or elements of a kind that another argument selects. Null pointers have this kind, too.
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
    /// Whether memory of these elements can be read as elements of another kind.
    #[must_use]
    pub fn fits(self, other: Self) -> bool {
        self == other || self == Self::Any || other == Self::Any
    }

    /// Unsigned integers of `size` bytes, for elements that are only copied.
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
            /// The kind of elements there.
            pub element: Element,
        }

        impl $name {
            /// A null pointer, for optional arguments.
            pub const NULL: Self = Self { address: 0, element: Element::Any };

            /// The address of elements of a kind.
            #[must_use]
            pub const fn new(address: Address, element: Element) -> Self {
                Self { address, element }
            }

            /// The address plus a number of bytes.
            #[must_use]
            pub const fn behind(self, bytes: usize) -> Self {
                Self { address: self.address + bytes as Address, ..self }
            }
        }
    )*};
}

pointers! {
    /// Memory that a kernel reads.
    Const;
    /// Memory that a kernel writes.
    Mut;
}

/// A kernel that takes the arguments `A`. There are variants of it for dtypes.
#[derive(Debug)]
pub struct Kernel<A> {
    /// The module of its file.
    pub module: &'static Module,
    /// Its name, without the dtypes.
    pub name: &'static str,
    /// The variants for dtypes.
    pub variants: &'static [Variant],
    takes: PhantomData<fn(A)>,
}

impl<A> Kernel<A> {
    const fn new(module: &'static Module, name: &'static str, variants: &'static [Variant]) -> Self {
        Self { module, name, variants, takes: PhantomData }
    }
}

/// A kernel for some dtypes.
#[derive(Debug)]
pub struct Variant {
    /// The dtypes, which are the suffix of its name.
    pub dtypes: &'static [&'static str],
    /// The names of its pointers and their element types.
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

    /// Call `to` with the addresses of the arguments, in the driver's form, and the element types of the pointers among them.
    fn lend<R>(&self, to: impl FnOnce(&mut [*mut c_void], &[Element]) -> R) -> R;
}

/// The address of an argument, which the driver does not write.
const fn place<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
