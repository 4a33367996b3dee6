package contract

// LifecycleState is the current state in a VM's life, for callers that wait for a state.
type LifecycleState string

// The lifecycle states. Creating and hibernating are temporary; the others last until a change is requested.
const (
	LifecycleCreating    LifecycleState = "creating"
	LifecycleReady       LifecycleState = "ready"
	LifecycleHibernating LifecycleState = "hibernating"
	LifecycleHibernated  LifecycleState = "hibernated"
	LifecycleFailed      LifecycleState = "failed"
)

// Settled reports whether the state lasts. Only a settled state answers for a generation.
func (s LifecycleState) Settled() bool {
	return s == LifecycleReady || s == LifecycleHibernated || s == LifecycleFailed
}

// Lifecycle is the state of a VM as reported in its pod's annotations. The zero value means no state.
type Lifecycle struct {
	State    LifecycleState
	Observed string // the generation (KeyGeneration) that a settled state answers for
	Message  string // why it failed, or why it takes so long
}

// ParseLifecycle reads a Lifecycle. The error, if any, is an Errors with every bad key.
func ParseLifecycle(annotations map[string]string) (Lifecycle, error) {
	r := &reader{from: annotations}
	l := Lifecycle{
		State:    oneOf(r, KeyLifecycleState, LifecycleCreating, LifecycleReady, LifecycleHibernating, LifecycleHibernated, LifecycleFailed),
		Observed: r.generation(KeyLifecycleObserved),
		Message:  annotations[KeyLifecycleMessage],
	}
	return l, r.errs.err()
}

// Apply writes l to annotations: keys of empty fields are removed.
func (l Lifecycle) Apply(annotations map[string]string) {
	put(annotations, KeyLifecycleState, string(l.State))
	put(annotations, KeyLifecycleObserved, l.Observed)
	put(annotations, KeyLifecycleMessage, l.Message)
}

// Generation is the CocoonSet generation that the pod was last written for, or "" if it is missing or not a number.
func Generation(annotations map[string]string) string {
	r := &reader{from: annotations}
	return r.generation(KeyGeneration)
}

// generation reads a number that only grows. It stays text, because this package does not calculate with it.
func (r *reader) generation(key string) string {
	v := r.from[key]
	if len(v) > 20 {
		r.bad(key, "must be a generation")
		return ""
	}
	for _, c := range v {
		if c < '0' || c > '9' {
			r.bad(key, "must be a generation")
			return ""
		}
	}
	return v
}
