package appliance

import (
	"cmp"
	"context"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/appliance/identity"
	"cocoonstack.io/cocoon/internal/capsulewire"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/grpcerr"
)

const adopt = capsulev1.IdentityService_Adopt_FullMethodName

// access is what a method needs.
type access struct {
	role    capsulev1.Role
	changes bool // the audit log has each call
}

// methods are all methods of the API that need a token. A method that is not here is refused.
var methods = map[string]access{
	capsulev1.CapsuleService_GetInfo_FullMethodName:       {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.CapsuleService_StreamLogs_FullMethodName:    {capsulev1.Role_ROLE_OPERATE, false},
	capsulev1.CapsuleService_UpdateOS_FullMethodName:      {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.CapsuleService_UpdateConfirm_FullMethodName: {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.CapsuleService_RebootNode_FullMethodName:    {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.CapsuleService_GrowDisk_FullMethodName:      {capsulev1.Role_ROLE_ADMIN, true},

	capsulev1.IdentityService_WhoAmI_FullMethodName:    {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.IdentityService_KeyList_FullMethodName:   {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.IdentityService_KeyAdd_FullMethodName:    {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.IdentityService_KeyRemove_FullMethodName: {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.IdentityService_Audit_FullMethodName:     {capsulev1.Role_ROLE_ADMIN, false},

	capsulev1.WorkloadService_Get_FullMethodName:      {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.WorkloadService_List_FullMethodName:     {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.WorkloadService_Events_FullMethodName:   {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.WorkloadService_Logs_FullMethodName:     {capsulev1.Role_ROLE_OPERATE, false},
	capsulev1.WorkloadService_Apply_FullMethodName:    {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_Delete_FullMethodName:   {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_Exec_FullMethodName:     {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_Restart_FullMethodName:  {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_Stop_FullMethodName:     {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_Start_FullMethodName:    {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_CopyTo_FullMethodName:   {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.WorkloadService_CopyFrom_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},

	capsulev1.VolumeService_Get_FullMethodName:    {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.VolumeService_List_FullMethodName:   {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.VolumeService_Create_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Delete_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Resize_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},

	capsulev1.VolumeService_SnapshotList_FullMethodName:   {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.VolumeService_Snapshot_FullMethodName:       {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_SnapshotDelete_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Clone_FullMethodName:          {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Rollback_FullMethodName:       {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Export_FullMethodName:         {capsulev1.Role_ROLE_OPERATE, true},
	capsulev1.VolumeService_Import_FullMethodName:         {capsulev1.Role_ROLE_OPERATE, true},

	capsulev1.NetworkService_Get_FullMethodName:     {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.NetworkService_Set_FullMethodName:     {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.NetworkService_Confirm_FullMethodName: {capsulev1.Role_ROLE_ADMIN, true},

	capsulev1.ImageService_List_FullMethodName: {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.ImageService_Push_FullMethodName: {capsulev1.Role_ROLE_OPERATE, true},

	capsulev1.ImageService_RegistryList_FullMethodName:   {capsulev1.Role_ROLE_VIEW, false},
	capsulev1.ImageService_RegistryLogin_FullMethodName:  {capsulev1.Role_ROLE_ADMIN, true},
	capsulev1.ImageService_RegistryLogout_FullMethodName: {capsulev1.Role_ROLE_ADMIN, true},
}

// admit returns the context of a call that may be made, with its caller.
// Errors: Unauthenticated, PermissionDenied, ResourceExhausted.
func (d *Door) admit(ctx context.Context, method string) (context.Context, error) {
	if method == adopt {
		return ctx, nil
	}
	md, _ := metadata.FromIncomingContext(ctx)
	token := bearer(md.Get("authorization"))
	if token == "" {
		return ctx, errdefs.Unauthenticatedf("the call has no token; adopt the machine first: capsulectl adopt")
	}
	caller, err := d.deps.Identity.Authenticate(token)
	if err != nil {
		return ctx, err
	}
	ctx = identity.WithCaller(ctx, caller)
	need, ok := methods[method]
	if !ok {
		return ctx, errdefs.Unsupportedf("this machine has no method %s", method)
	}
	return ctx, allow(caller, need.role, method)
}

// allow returns PermissionDenied unless the key has the role.
func allow(caller identity.Key, need capsulev1.Role, what string) error {
	if caller.Role >= need {
		return nil
	}
	return errdefs.Deniedf("%s needs the role %s, and the key %q has %s; ask an administrator of the machine", what, roleName(need), caller.Name, roleName(caller.Role))
}

// callerOf returns the key of the caller of a call.
func callerOf(ctx context.Context) identity.Key {
	k, _ := identity.Caller(ctx)
	return k
}

func roleName(r capsulev1.Role) string {
	return strings.ToLower(strings.TrimPrefix(cmp.Or(r, capsulev1.Role_ROLE_ADMIN).String(), "ROLE_"))
}

// bearer returns the token of an authorization header; "" if there is not exactly one.
func bearer(values []string) string {
	if len(values) != 1 {
		return ""
	}
	scheme, token, _ := strings.Cut(strings.TrimSpace(values[0]), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}

// timeTrailer tells a client whose clock differs from ours what time it is here.
func timeTrailer() metadata.MD {
	return metadata.Pairs(capsulewire.TimeHeader, strconv.FormatInt(time.Now().Unix(), 10))
}

func (d *Door) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	ctx, err := d.admit(ctx, info.FullMethod)
	var resp any
	if err == nil {
		resp, err = handle(ctx, req)
	} else if errdefs.Is(err, errdefs.Unauthenticated) {
		_ = grpc.SetTrailer(ctx, timeTrailer()) // only a help
	}
	return resp, d.answer(ctx, info.FullMethod, objectOf(req), err)
}

func (d *Door) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	ctx, err := d.admit(ss.Context(), info.FullMethod)
	s := &admitted{ServerStream: ss, ctx: ctx}
	if err == nil {
		err = handle(srv, s)
	} else if errdefs.Is(err, errdefs.Unauthenticated) {
		ss.SetTrailer(timeTrailer())
	}
	return d.answer(ctx, info.FullMethod, s.object, err)
}

// admitted is the stream of a call with a caller. It remembers which object the call is about.
type admitted struct {
	grpc.ServerStream
	ctx    context.Context //nolint:containedctx // of the stream
	object string
}

func (a *admitted) Context() context.Context { return a.ctx }

func (a *admitted) RecvMsg(m any) error {
	err := a.ServerStream.RecvMsg(m)
	if err == nil && a.object == "" {
		a.object = objectOf(m)
	}
	return err
}

// objectOf returns the name of the object that a message is about; "": none.
func objectOf(m any) string {
	switch m := m.(type) {
	case *capsulev1.WorkloadApplyRequest:
		return m.GetWorkload().GetName()
	case *capsulev1.WorkloadExecClientMessage:
		return m.GetConfig().GetName()
	case *capsulev1.WorkloadCopyToRequest:
		return m.GetMetadata().GetName()
	case *capsulev1.VolumeImportRequest:
		return m.GetMetadata().GetName()
	case *capsulev1.KeyRemoveRequest:
		return m.GetKid()
	case interface{ GetName() string }:
		return m.GetName()
	case interface{ GetRegistry() string }:
		return m.GetRegistry()
	}
	return ""
}

// answer turns an error into a status, and writes the audit log.
func (d *Door) answer(ctx context.Context, method, object string, err error) error {
	err = grpcerr.ToStatus(err)
	code := status.Code(err)
	refused := errdefs.Is(grpcerr.FromStatus(err), errdefs.PermissionDenied) || errdefs.Is(grpcerr.FromStatus(err), errdefs.Unauthenticated)
	if methods[method].changes || method == adopt || refused {
		from := ""
		if p, ok := peer.FromContext(ctx); ok {
			from = p.Addr.String()
		}
		caller, known := identity.Caller(ctx)
		e := &capsulev1.AuditEntry{Method: method, Object: object, Code: code.String(), Peer: from}
		if known {
			e.Kid, e.Name = caller.Kid(), caller.Name
		}
		d.audit.add(ctx, e, known || method == adopt)
	}
	return err
}
