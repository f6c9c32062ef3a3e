package kernel

// Decay is how the weights decay.
type Decay uint8

// The kinds of decay.
const (
	NoDecay        Decay = iota
	L2Decay              // weight_decay*param is added to the gradient [Adam]
	DecoupledDecay       // the parameter is multiplied by 1 - lr*weight_decay [AdamW]
)

func (d Decay) String() string { return [...]string{"none", "l2", "decoupled"}[d] }

// Arithmetic is how a multiplication followed by an addition is rounded.
type Arithmetic uint8

// The kinds of arithmetic.
const (
	FMA   Arithmetic = iota // once, as PyTorch does on CPUs with AVX2
	Plain                   // after each of the two
)

func (a Arithmetic) String() string { return [...]string{"fma", "plain"}[a] }

// SquareRoot is the function taken for the square root of the second moment.
type SquareRoot uint8

// The kinds of square root.
const (
	IEEE        SquareRoot = iota // correctly rounded
	Goldschmidt                   // [Goldschmidt] from the CPU's RSQRTPS
	Newton                        // one step of Newton's method from AVX-512's VRSQRT14PS
	Library                       // a function of the caller's
)

func (r SquareRoot) String() string {
	return [...]string{"ieee", "goldschmidt", "newton", "library"}[r]
}

// Estimated reports whether r starts from an estimate of the CPU's. It then reproduces a library's root only when rounding to
// nearest without flushing: its small intermediate results are the library's own matter.
func (r SquareRoot) Estimated() bool { return r == Goldschmidt || r == Newton }

// Has reports whether backend b can take the square root r of a T: an estimate is an instruction of some CPUs, for float32.
func Has[T Float](b Backend, r SquareRoot) bool {
	if _, double := any(*new(T)).(float64); double {
		return !r.Estimated()
	}
	switch r {
	case Goldschmidt:
		return b != Generic
	case Newton:
		return b == AVX512
	}
	return true
}

// Multiplies reports whether v has a kernel on backend b that multiplies by Scalars.Reciprocal. That takes an FMA; among
// Goldschmidt's many multiplications a division costs nothing.
func Multiplies[T Float](b Backend, v Variant) bool {
	_, single := any(*new(T)).(float32)
	return single && b != Generic && v.Arithmetic == FMA && (v.SquareRoot == IEEE || v.SquareRoot == Newton) && Has[T](b, v.SquareRoot)
}

// Variant is one specialisation of the update. A backend has one kernel of an element for each whose square root it can take.
type Variant struct {
	Decay      Decay
	AMSGrad    bool
	Maximize   bool
	Arithmetic Arithmetic
	SquareRoot SquareRoot
}

// String names the variant, as in "l2_amsgrad_maximize/fma/ieee".
func (v Variant) String() string {
	name := v.Decay.String()
	if v.AMSGrad {
		name += "_amsgrad"
	}
	if v.Maximize {
		name += "_maximize"
	}
	return name + "/" + v.Arithmetic.String() + "/" + v.SquareRoot.String()
}

// numVariants is the length of Variants.
const numVariants = 4 * 2 * 3 * 2 * 2

// Variants lists every variant. The generated tables of kernels are in this order.
func Variants() []Variant {
	variants := make([]Variant, 0, numVariants)
	for _, root := range []SquareRoot{IEEE, Goldschmidt, Newton, Library} {
		for _, arithmetic := range []Arithmetic{FMA, Plain} {
			for _, decay := range []Decay{NoDecay, L2Decay, DecoupledDecay} {
				for _, amsgrad := range []bool{false, true} {
					for _, maximize := range []bool{false, true} {
						variants = append(variants, Variant{decay, amsgrad, maximize, arithmetic, root})
					}
				}
			}
		}
	}
	return variants
}

// index is the variant's place in Variants.
func (v Variant) index() int {
	i := (int(v.SquareRoot)*2+int(v.Arithmetic))*3 + int(v.Decay)
	i *= 4
	if v.AMSGrad {
		i += 2
	}
	if v.Maximize {
		i++
	}
	return i
}
