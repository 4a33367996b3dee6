package objects

import "cocoonstack.io/cocoon/internal/errdefs"

func tooLarge(key string, size, limit int64) error {
	return errdefs.DataLossf("object %s has %d bytes; at most %d are expected", key, size, limit)
}
