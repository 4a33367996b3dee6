package aggregated

import (
	"context"
	"fmt"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// freeze freezes the file systems of the guest of an instance until unfreeze, or until unfreezeTimeout has passed: its node thaws them then.
func (s *Server) freeze(w http.ResponseWriter, r *http.Request, t target) error {
	var o v1.FreezeUnfreezeTimeout
	if err := decode(w, r, &o); err != nil {
		return err
	}
	most := contract.MaxFreeze
	if d := o.UnfreezeTimeout; d != nil && d.Duration != 0 {
		most = d.Duration
	}
	if most < time.Second || most > contract.MaxFreeze {
		return apierrors.NewBadRequest(fmt.Sprintf("unfreezeTimeout must be from 1s to %s, or 0s for the longest", contract.MaxFreeze))
	}
	pod, err := s.answering(r.Context(), t)
	if err != nil {
		return err
	}
	return accepted(w, s.guests.freeze(r.Context(), pod, most))
}

// unfreeze ends a freeze. Without one it does nothing.
func (s *Server) unfreeze(w http.ResponseWriter, r *http.Request, t target) error {
	pod, err := s.answering(r.Context(), t)
	if err != nil {
		return err
	}
	_, err = s.guests.thaw(r.Context(), pod)
	return accepted(w, err)
}

// Freezer freezes and thaws the guests of instances, by their pods.
type Freezer struct{ streams podStreams }

// NewFreezer returns a Freezer that reaches nodes through the API server of config.
func NewFreezer(config *rest.Config) Freezer { return Freezer{podStreams{config}} }

// Freeze freezes the file systems of a pod's guest. The node thaws them after the time most. An error has the status that the node gave.
func (f Freezer) Freeze(ctx context.Context, pod types.NamespacedName, most time.Duration) error {
	return f.streams.freeze(ctx, pod, most)
}

// Thaw ends a freeze, and reports whether it lasted until now.
func (f Freezer) Thaw(ctx context.Context, pod types.NamespacedName) (held bool, err error) {
	return f.streams.thaw(ctx, pod)
}
