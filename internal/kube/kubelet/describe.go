package kubelet

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// guestLimit is how long a guest may take to answer. It may first have to write to its disks what it has in memory.
const guestLimit = 45 * time.Second

// askGuest sends the answer of a guest to what contract.HeaderGuest says, as JSON. As with a screen, an error comes before the connection is upgraded.
func (s *Server) askGuest(w http.ResponseWriter, r *http.Request, what string) {
	want, err := parseWishes(r)
	most, freezes, unfit := contract.ParseGuestFreeze(what)
	switch {
	case err != nil:
	case unfit != nil:
		err = errdefs.As(errdefs.InvalidArgument, unfit)
	case !freezes && what != contract.GuestDescription && what != contract.GuestThaw:
		err = errdefs.Invalidf("header %s must be %s, %s or a freeze", contract.HeaderGuest, contract.GuestDescription, contract.GuestThaw)
	case want.tty || want.stderr || !want.stdout || want.stdin:
		err = errdefs.Invalidf("the answer of a guest needs stdout alone")
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), guestLimit)
	defer cancel()
	namespace, pod, container := r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container")
	var answer any = struct{}{}
	switch {
	case freezes:
		err = s.cfg.Backend.Freeze(ctx, namespace, pod, container, most)
	case what == contract.GuestThaw:
		var held bool
		held, err = s.cfg.Backend.Thaw(ctx, namespace, pod, container)
		answer = contract.GuestThawed{Held: held}
	default:
		answer, err = s.cfg.Backend.Describe(ctx, namespace, pod, container)
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	s.session(w, r, want, "asking the guest of", func(_ context.Context, se *session) (int, error) {
		return 0, json.NewEncoder(se.stdout).Encode(answer)
	})
}
