package contract

// EvictionPolicy says what an eviction of a pod does with its VM. Empty selects the default for that kind of pod.
type EvictionPolicy string

// The eviction policies.
const (
	EvictHibernate EvictionPolicy = "hibernate" // the pod goes once its VM is hibernated in the registry; the next pod restores it
	EvictDelete    EvictionPolicy = "delete"    // the same as deleting the pod
	EvictRefuse    EvictionPolicy = "refuse"    // the pod stays until somebody deletes it
)

// ParseEvictionPolicy reads the policy. The error, if any, is an Errors.
func ParseEvictionPolicy(annotations map[string]string) (EvictionPolicy, error) {
	r := &reader{from: annotations}
	p := oneOf(r, KeyEvictionPolicy, EvictHibernate, EvictDelete, EvictRefuse)
	return p, r.errs.err()
}

// ComesBack reports whether a recreated pod with these annotations may find its VM hibernated in the registry.
func ComesBack(annotations map[string]string) bool {
	return annotations[KeyManaged] == "true" || annotations[KeyEvictionPolicy] == string(EvictHibernate)
}
