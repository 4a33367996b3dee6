package kubevirt

import v1 "kubevirt.io/api/core/v1"

// ClaimOf returns the name of the claim behind a volume of a machine, "" if there is none.
func ClaimOf(v *v1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.DataVolume != nil: // it has the name of its claim
		return v.DataVolume.Name
	}
	return ""
}
