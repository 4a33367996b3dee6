package cocoonmanager

import (
	"context"
	"time"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/ociclient"
	"cocoonstack.io/cocoon/internal/snapshot"
)

// registryLimit is how long one question to the registry may take, its retries included.
const registryLimit = 10 * time.Second

// registry asks an OCI registry for tags. It implements controller.Registry.
type registry struct {
	base string // URL
	auth snapshot.Auth
}

// Has implements controller.Registry.
func (r registry) Has(ctx context.Context, vmName, tag string) (bool, error) {
	err := r.session(ctx, vmName, tag, "pull", func(ctx context.Context, s *ociclient.Session) error {
		_, err := s.Head(ctx, tag)
		return err
	})
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

// Delete implements controller.Registry.
func (r registry) Delete(ctx context.Context, vmName, tag string) error {
	err := r.session(ctx, vmName, tag, "pull,push,delete", func(ctx context.Context, s *ociclient.Session) error {
		return s.DeleteManifest(ctx, tag)
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func (r registry) session(ctx context.Context, vmName, tag, scope string, do func(context.Context, *ociclient.Session) error) error {
	ref, err := ociclient.ParseRef(r.base + "/" + vmName + ":" + tag)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, registryLimit)
	defer cancel()
	s, err := ociclient.Open(ctx, ref, ociclient.Auth{Token: r.auth.Token, CA: r.auth.CA}, scope, ociclient.Config{Attempts: 2})
	if err != nil {
		return err
	}
	defer s.Close()
	return do(ctx, s)
}
