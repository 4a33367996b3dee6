package contract

// EvictionPolicy says what an eviction of a pod does with its VM. Empty: as is usual for such a pod.
type EvictionPolicy string

// The eviction policies.
const (
	EvictHibernate EvictionPolicy = "hibernate" // the pod goes when its VM sleeps in the registry, from where the next pod has it
	EvictDelete    EvictionPolicy = "delete"    // as the pod's deletion does
	EvictRefuse    EvictionPolicy = "refuse"    // the pod stays until somebody deletes it
)

// ParseEvictionPolicy reads the policy. The error, if any, is an Errors.
func ParseEvictionPolicy(annotations map[string]string) (EvictionPolicy, error) {
	r := &reader{from: annotations}
	p := oneOf(r, KeyEvictionPolicy, EvictHibernate, EvictDelete, EvictRefuse)
	return p, r.errs.err()
}

// ComesBack reports whether a pod with these annotations that is made anew may have its VM asleep in the registry.
func ComesBack(annotations map[string]string) bool {
	return annotations[KeyManaged] == "true" || annotations[KeyEvictionPolicy] == string(EvictHibernate)
}
