package contract

// EvictionPolicy says what an eviction of a pod does with its VM. Empty selects the default for that kind of pod.
type EvictionPolicy string

// The eviction policies.
const (
	EvictHibernate EvictionPolicy = "hibernate" // the pod goes once its VM is hibernated in the registry; the next pod restores it
	EvictDelete    EvictionPolicy = "delete"    // the same as deleting the pod
	EvictRefuse    EvictionPolicy = "refuse"    // the pod stays until somebody deletes it
	EvictShutdown  EvictionPolicy = "shutdown"  // the VM shuts down; the next pod waits for its node, as with KeySticky
)

// ParseEvictionPolicy reads the policy. The error, if any, is an Errors.
func ParseEvictionPolicy(annotations map[string]string) (EvictionPolicy, error) {
	r := &reader{from: annotations}
	p := oneOf(r, KeyEvictionPolicy, EvictHibernate, EvictDelete, EvictRefuse, EvictShutdown)
	return p, r.errs.err()
}

// ComesBack reports whether a recreated pod with these annotations may find its VM hibernated.
func ComesBack(annotations map[string]string) bool {
	return annotations[KeyManaged] == "true" || annotations[KeyEvictionPolicy] == string(EvictHibernate) || HibernatesOnDelete(annotations)
}

// DeletionPolicy says what the deletion of a pod does with its VM. Empty means delete.
type DeletionPolicy string

// The deletion policies.
const (
	DeleteHibernates DeletionPolicy = "hibernate" // the VM hibernates; the next pod of the name and owner resumes it
	DeleteRemoves    DeletionPolicy = "delete"    // the VM is removed
)

// ParseDeletionPolicy reads the policy. The error, if any, is an Errors.
func ParseDeletionPolicy(annotations map[string]string) (DeletionPolicy, error) {
	r := &reader{from: annotations}
	p := oneOf(r, KeyDeletionPolicy, DeleteHibernates, DeleteRemoves)
	return p, r.errs.err()
}

// HibernatesOnDelete reports whether the VM hibernates when its pod is deleted.
func HibernatesOnDelete(annotations map[string]string) bool {
	return annotations[KeyDeletionPolicy] == string(DeleteHibernates)
}
